#!/bin/sh
# Builds the native host kernel beside its source: seconds, and nothing but g++.
# -ffp-contract=off: no fused multiply-add, so that every instruction set gives the same bits.
set -e
cd "$(dirname "$0")"
"${CXX:-g++}" -O3 -std=c++17 -fPIC -shared -pthread -fopenmp-simd -ffp-contract=off \
    -fno-math-errno -fno-trapping-math -o libhost_kernel.so host_kernel.cpp
