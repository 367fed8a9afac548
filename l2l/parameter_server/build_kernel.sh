#!/bin/sh
# Builds the native host kernel beside its source: seconds, and nothing but g++.
# -ffp-contract=off: no fused multiply-add, so that every instruction set gives the same bits.
# -mno-mmx: MMX registers are those of the x87 unit, which gives NaN to whoever uses it next.
set -e
cd "$(dirname "$0")"
case "$(uname -m)" in x86_64 | i?86) x86="-mno-mmx" ;; *) x86="" ;; esac
"${CXX:-g++}" -O3 -std=c++17 -fPIC -shared -pthread -fopenmp-simd -ffp-contract=off $x86 \
    -fno-math-errno -fno-trapping-math -o libhost_kernel.so host_kernel.cpp
