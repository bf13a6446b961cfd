// What a host declares: read once by the compiler, for all sources.
#ifndef LINATTN_HOST
#define LINATTN_HOST
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#endif
