#!/bin/sh -e
# Makes the PTX of these kernels with the nvcc of CUDA 13.5: ./make.sh /path/to/nvcc
cd "$(dirname "$0")"
nvcc=${1:-nvcc}
make() {
  from=$1 to=$2
  shift 2
  "$nvcc" -ptx "$@" -o "$to.ptx.part" "$from.cu"
  { echo "// Made by: nvcc -ptx $* $from.cu"; cat "$to.ptx.part"; } > "$to.ptx"
  rm "$to.ptx.part"
}
for name in basics shared grids wide; do make $name $name -arch=sm_75; done
make maths maths -arch=sm_80
for name in basics shared grids; do make $name $name-debug -arch=sm_75 -G; done
make shared shared-sm_90 -arch=sm_90 -lineinfo
for mode in none speed size; do
  "$nvcc" -fatbin -gencode arch=compute_75,code=compute_75 -gencode arch=compute_90,code=compute_90 -compress-mode=$mode \
    -o small-$mode.fatbin small.cu
done
