"""Compiles a module's Triton kernels to machine code for an H100, without one: python machine_code.py MODULE."""

import re
import sys
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Bits of the residual, whether options are on, and bits of a value on the wire.
WIDTHS = (32, True, 2), (64, True, 4), (32, False, 16)


def pointers(**types):
    return {name: kind for kind, names in types.items() for name in names.split()}


DOORS = {
    "cuda": "sample accumulate narrow tally choose decay",
    "denominator_cuda": "count follow",
    "rows_cuda": "encode digest count places values",
}
NAMES = {  # each kernel's pointers by what they point to; the others are numbers
    "cuda": pointers(
        i16="places",
        i64="table parameters tiles state blocks index used",
        i32="histogram above crowded found larger equal flags",
        real="u v p w scale like squares",
        mark="marks",
    ),
    "rows_cuda": pointers(
        i1="fine",
        i16="halves",
        i32="words flags",
        i64="places used total counts ends limits",
        real="values sent",
    ),
    "denominator_cuda": pointers(
        i32="received total", real="x square largest factor deficits weights rates"
    ),
}
# Numbers with a fraction, in float32.
FLOATS = {
    "_decay": "m decay lr",
    "_follow": "grown top scale inverse eps",
}


def compile_all(module):
    kernels, count = import_module(f"dgc.compression.kernels.{module}"), 0
    for bits, yes, value_bits in WIDTHS:
        constants = {
            "SCALED": 1 + yes,
            "ROUNDS": 4,
            "SELECT": True,
            "ROOM": 64,
            "ALIGNED": True,
            "BITS": value_bits,
            "ALL": False,
            **dict.fromkeys(("VELOCITY", "LOOKS_AHEAD", "LARGEST"), yes),
        }
        for door in DOORS[module].split():
            if bits == 64 and f"_{door}" in FLOATS:
                continue
            kernel = getattr(kernels, f"_{door}")
            here = {n: c for n, c in constants.items() if n in kernel.arg_names}
            types = {
                n: "*" + {"real": f"fp{bits}", "mark": f"i{bits}"}.get(k, k)
                for n, k in NAMES[module].items()
            }
            types |= dict.fromkeys(FLOATS.get(f"_{door}", "").split(), "fp32")
            signature = {
                n: "constexpr" if n in here else types.get(n, "i32") for n in kernel.arg_names
            }
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(kernel.arg_names)
                if signature[n][0] == "*"
            }
            compiled = triton.compile(
                ASTSource(kernel, signature, here, aligned),
                target=GPUTarget("cuda", 90, 32),
                options={"enable_fp_fusion": False, "num_warps": 8},
            )
            ptx = compiled.asm["ptx"]
            assert len(compiled.asm["cubin"]) > 0 and not re.search(
                "fma.rn.f|div.full|sqrt.approx|ftz", ptx
            ), kernel
            if door == "accumulate":  # 16 bytes at once
                assert re.search(r"ld.global[.\w]*v[24]", ptx)
            count += 1
    return count


if __name__ == "__main__":
    print(compile_all(sys.argv[1]), "kernels")
