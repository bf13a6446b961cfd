// Where the numbers of a tile lie in the memory that momentum_systems.cu writes, in floats.
#pragma once
#include "fast_weights/operands.cuh"

constexpr int C = 64;   // tokens of a tile, at most
enum { OF_R = 0, OF_N, OF_C, OF_D, OF_C_POINT, OF_D_POINT, COEFFICIENTS, ENDS_COUNT = 4 };   // u, z, c, d, c', d'
enum { OF_INVERSE = 0, OF_P = C * C, BY_TOKEN = 2 * C * C, ENDS = BY_TOKEN + COEFFICIENTS * C };
constexpr int SYSTEM = ENDS + ENDS_COUNT;   // ends: S = [0] S + [1] M + .., M = [2] M + ..; [3] the bits of HALF
constexpr u32 HALF = 0x1000;                // of the last bit of tf32

// as products read it
LA_DEVICE float stored(float x) { return LA_EXACT ? x : __uint_as_float(round_tf32(x)); }
