//! Copies and memsets: plain ones, those of a stream, and what they are of.

use super::{api, read, stream};
use crate::{
    copy::{self, Copy, End, Fill},
    error::{Error, Result},
    ffi::{Copy2d, Copy3d},
};

/// An end in a context of its own.
fn peer(at: u64, context: u64) -> End {
    End { context, ..End::device(at) }
}

/// A memset of bytes, of one row where `rows` has no pitch and height.
fn set(
    handle: u64,
    at: u64,
    value: u32,
    unit: usize,
    width: usize,
    rows: Option<(usize, usize)>,
    waits: bool,
) -> Result {
    let (pitch, height) = rows.unwrap_or((0, 1));
    if height > 1 && width.checked_mul(unit).is_none_or(|width| pitch < width) {
        return Err(Error::InvalidValue);
    }
    copy::fill(handle, Fill { at, pitch, value, unit, width, height }, waits)
}

api! {
    3020 fn cuMemcpyHtoD_v2(dst: u64, src: u64, count: usize) / cuMemcpyHtoD_v2_ptds as own {
        copy::submit(own, Copy::bytes(End::device(dst), End::host(src), count), true)
    }
    3020 fn cuMemcpyHtoDAsync_v2(dst: u64, src: u64, count: usize, hStream: u64) / cuMemcpyHtoDAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(End::device(dst), End::host(src), count), false)
    }
    3020 fn cuMemcpyDtoH_v2(dst: u64, src: u64, count: usize) / cuMemcpyDtoH_v2_ptds as own {
        copy::submit(own, Copy::bytes(End::host(dst), End::device(src), count), true)
    }
    3020 fn cuMemcpyDtoHAsync_v2(dst: u64, src: u64, count: usize, hStream: u64) / cuMemcpyDtoHAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(End::host(dst), End::device(src), count), false)
    }
    3020 fn cuMemcpyDtoD_v2(dst: u64, src: u64, count: usize) / cuMemcpyDtoD_v2_ptds as own {
        copy::submit(own, Copy::bytes(End::device(dst), End::device(src), count), true)
    }
    3020 fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, count: usize, hStream: u64) / cuMemcpyDtoDAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(End::device(dst), End::device(src), count), false)
    }
    4000 fn cuMemcpy(dst: u64, src: u64, count: usize) / cuMemcpy_ptds as own {
        copy::submit(own, Copy::bytes(End::host(dst), End::host(src), count), true)
    }
    4000 fn cuMemcpyAsync(dst: u64, src: u64, count: usize, hStream: u64) / cuMemcpyAsync_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(End::host(dst), End::host(src), count), false)
    }
    4000 fn cuMemcpyPeer(dst: u64, dstContext: u64, src: u64, srcContext: u64, count: usize) / cuMemcpyPeer_ptds as own {
        copy::submit(own, Copy::bytes(peer(dst, dstContext), peer(src, srcContext), count), true)
    }
    4000 fn cuMemcpyPeerAsync(dst: u64, dstContext: u64, src: u64, srcContext: u64, count: usize, hStream: u64) / cuMemcpyPeerAsync_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(peer(dst, dstContext), peer(src, srcContext), count), false)
    }
    3020 fn cuMemcpy2D_v2(copy: *const Copy2d) / cuMemcpy2D_v2_ptds as own {
        copy::submit(own, Copy::of_2d(&read(copy)?)?, true)
    }
    3020 fn cuMemcpy2DAsync_v2(copy: *const Copy2d, hStream: u64) / cuMemcpy2DAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::of_2d(&read(copy)?)?, false)
    }
    3020 fn cuMemcpy2DUnaligned_v2(copy: *const Copy2d) / cuMemcpy2DUnaligned_v2_ptds as own {
        copy::submit(own, Copy::of_2d(&read(copy)?)?, true)
    }
    3020 fn cuMemcpy3D_v2(copy: *const Copy3d) / cuMemcpy3D_v2_ptds as own {
        copy::submit(own, Copy::of_3d(&read(copy)?, false)?, true)
    }
    3020 fn cuMemcpy3DAsync_v2(copy: *const Copy3d, hStream: u64) / cuMemcpy3DAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::of_3d(&read(copy)?, false)?, false)
    }
    4000 fn cuMemcpy3DPeer(copy: *const Copy3d) / cuMemcpy3DPeer_ptds as own {
        copy::submit(own, Copy::of_3d(&read(copy)?, true)?, true)
    }
    4000 fn cuMemcpy3DPeerAsync(copy: *const Copy3d, hStream: u64) / cuMemcpy3DPeerAsync_ptsz as own {
        copy::submit(stream(hStream, own), Copy::of_3d(&read(copy)?, true)?, false)
    }
    3020 fn cuMemsetD8_v2(dst: u64, value: u8, count: usize) / cuMemsetD8_v2_ptds as own {
        set(own, dst, value.into(), 1, count, None, true)
    }
    3020 fn cuMemsetD8Async(dst: u64, value: u8, count: usize, hStream: u64) / cuMemsetD8Async_ptsz as own {
        set(stream(hStream, own), dst, value.into(), 1, count, None, false)
    }
    3020 fn cuMemsetD2D8_v2(dst: u64, pitch: usize, value: u8, width: usize, height: usize) / cuMemsetD2D8_v2_ptds as own {
        set(own, dst, value.into(), 1, width, Some((pitch, height)), true)
    }
    3020 fn cuMemsetD2D8Async(dst: u64, pitch: usize, value: u8, width: usize, height: usize, hStream: u64) / cuMemsetD2D8Async_ptsz as own {
        set(stream(hStream, own), dst, value.into(), 1, width, Some((pitch, height)), false)
    }
    3020 fn cuMemsetD16_v2(dst: u64, value: u16, count: usize) / cuMemsetD16_v2_ptds as own {
        set(own, dst, value.into(), 2, count, None, true)
    }
    3020 fn cuMemsetD16Async(dst: u64, value: u16, count: usize, hStream: u64) / cuMemsetD16Async_ptsz as own {
        set(stream(hStream, own), dst, value.into(), 2, count, None, false)
    }
    3020 fn cuMemsetD2D16_v2(dst: u64, pitch: usize, value: u16, width: usize, height: usize) / cuMemsetD2D16_v2_ptds as own {
        set(own, dst, value.into(), 2, width, Some((pitch, height)), true)
    }
    3020 fn cuMemsetD2D16Async(dst: u64, pitch: usize, value: u16, width: usize, height: usize, hStream: u64) / cuMemsetD2D16Async_ptsz as own {
        set(stream(hStream, own), dst, value.into(), 2, width, Some((pitch, height)), false)
    }
    3020 fn cuMemsetD32_v2(dst: u64, value: u32, count: usize) / cuMemsetD32_v2_ptds as own {
        set(own, dst, value, 4, count, None, true)
    }
    3020 fn cuMemsetD32Async(dst: u64, value: u32, count: usize, hStream: u64) / cuMemsetD32Async_ptsz as own {
        set(stream(hStream, own), dst, value, 4, count, None, false)
    }
    3020 fn cuMemsetD2D32_v2(dst: u64, pitch: usize, value: u32, width: usize, height: usize) / cuMemsetD2D32_v2_ptds as own {
        set(own, dst, value, 4, width, Some((pitch, height)), true)
    }
    3020 fn cuMemsetD2D32Async(dst: u64, pitch: usize, value: u32, width: usize, height: usize, hStream: u64) / cuMemsetD2D32Async_ptsz as own {
        set(stream(hStream, own), dst, value, 4, width, Some((pitch, height)), false)
    }
}
