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
# The same source for vectors of 16, 8 or 4 floats; the first flavour whose needs the CPU meets is taken.
FLAVOURS: dict[str, tuple[list[str], set[str]]] = {
    "avx512": (["-march=x86-64-v4", "-mprefer-vector-width=512", "-DLANES=16"], {"avx512f", "avx512vl", "avx512bw"}),
    "avx2": (["-march=x86-64-v3", "-DLANES=8"], {"avx2", "fma", "f16c"}),
    "portable": (["-DLANES=4"], set()),
}
