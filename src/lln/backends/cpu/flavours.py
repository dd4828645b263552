"""How the C code is compiled. It imports nothing, because the build of a wheel reads it without torch."""

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
]
# What the compiler may use for each level of the x86-64 psABI, as Linux names it. A virtual machine can hide any.
LEVEL_2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
LEVEL_3 = LEVEL_2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
LEVEL_4 = LEVEL_3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# The same source for vectors of 16, 8 or 4 floats; the first flavour whose needs the CPU meets is taken.
FLAVOURS: dict[str, tuple[list[str], set[str]]] = {
    "avx512": (["-march=x86-64-v4", "-mprefer-vector-width=512", "-DLANES=16"], LEVEL_4),
    "avx2": (["-march=x86-64-v3", "-DLANES=8"], LEVEL_3),
    "portable": (["-DLANES=4"], set()),
}
