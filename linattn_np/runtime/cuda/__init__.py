"""All there is to know about compiling and launching the CUDA sources: sources, compile, launch."""
