"""The elementwise core: h_t = a_t h_{t-1} + x_t of every channel by itself, real or complex."""
