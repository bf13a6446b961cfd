"""A small language for machine code, and pieces written in it: rows, tiles, states, feature maps. LLVM by llvmlite."""
