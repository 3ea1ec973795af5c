//! Copies and memsets: plain ones, those of a stream, and what they are of.

use super::{Unused, api, read, stream};
use crate::{
    copy::{self, Copy, End, Fill},
    error::{Error, Result},
    ffi::{Copy2d, Copy3d},
    stream::LEGACY,
    sys,
};

/// An end in a context of its own.
fn peer(at: u64, context: u64) -> End {
    End { context, ..End::device(at) }
}

/// So many bytes of an array, from an offset on.
fn array(array: u64, offset: usize, count: usize) -> Result<End> {
    Ok(End::device(crate::array::bytes_of(array, offset, count)?))
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
    copy::fill(handle, Fill { at, pitch, value, unit, width, height }, waits)
}

/// The copy that a `CUDA_MEMCPY3D_BATCH_OP` asks for, of addresses: rows and layers are told in bytes and rows.
fn batched(at: *const u64) -> Result<Copy> {
    const POINTER: u64 = 1;
    let word = |index| sys::read_at(at, index).ok_or(Error::InvalidValue);
    let (width, height, depth) = (word(10)? as usize, word(11)? as usize, word(12)? as usize);
    if [width, height, depth].contains(&0) || !(1..=3).contains(&(word(13)? as u32)) {
        return Err(Error::InvalidValue);
    }
    let end = |from| {
        let at = word(from + 1)?;
        let (row, rows) = (word(from + 2)? as usize, word(from + 3)? as usize);
        let [row, rows] =
            [(row, width), (rows, height)].map(|(said, least)| if said == 0 { least } else { said });
        if word(from)? & 0xffff_ffff != POINTER || row < width || rows < height {
            return Err(Error::InvalidValue);
        }
        let slice = row.checked_mul(rows).ok_or(Error::InvalidValue)?;
        Ok(End { pitch: row, slice, ..End::host(at) })
    };
    Ok(Copy { height, depth, ..Copy::bytes(end(5)?, end(0)?, width) })
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
    3020 fn cuMemcpyHtoA_v2(dst: u64, offset: usize, src: u64, count: usize) / cuMemcpyHtoA_v2_ptds as own {
        copy::submit(own, Copy::bytes(array(dst, offset, count)?, End::host(src), count), true)
    }
    3020 fn cuMemcpyHtoAAsync_v2(dst: u64, offset: usize, src: u64, count: usize, hStream: u64) / cuMemcpyHtoAAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(array(dst, offset, count)?, End::host(src), count), false)
    }
    3020 fn cuMemcpyAtoH_v2(dst: u64, src: u64, offset: usize, count: usize) / cuMemcpyAtoH_v2_ptds as own {
        copy::submit(own, Copy::bytes(End::host(dst), array(src, offset, count)?, count), true)
    }
    3020 fn cuMemcpyAtoHAsync_v2(dst: u64, src: u64, offset: usize, count: usize, hStream: u64) / cuMemcpyAtoHAsync_v2_ptsz as own {
        copy::submit(stream(hStream, own), Copy::bytes(End::host(dst), array(src, offset, count)?, count), false)
    }
    3020 fn cuMemcpyDtoA_v2(dst: u64, offset: usize, src: u64, count: usize) / cuMemcpyDtoA_v2_ptds as own {
        copy::submit(own, Copy::bytes(array(dst, offset, count)?, End::device(src), count), true)
    }
    3020 fn cuMemcpyAtoD_v2(dst: u64, src: u64, offset: usize, count: usize) / cuMemcpyAtoD_v2_ptds as own {
        copy::submit(own, Copy::bytes(End::device(dst), array(src, offset, count)?, count), true)
    }
    3020 fn cuMemcpyAtoA_v2(dst: u64, to: usize, src: u64, from: usize, count: usize) / cuMemcpyAtoA_v2_ptds as own {
        copy::submit(own, Copy::bytes(array(dst, to, count)?, array(src, from, count)?, count), true)
    }
    13000 fn cuMemcpyBatchAsync_v2(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize, attributes: Unused, places: *const usize,
        many: usize, hStream: u64
    ) / cuMemcpyBatchAsync_v2_ptsz as own {
        let _ = attributes;
        let stream = stream(hStream, own);
        let first = sys::read_at(places, 0).ok_or(Error::InvalidValue)?;
        if stream == LEGACY || count == 0 || !(1..=count).contains(&many) || first != 0 {
            return Err(Error::InvalidValue);
        }
        for index in 0..count {
            let (Some(dst), Some(src)) = (sys::read_at(dsts, index), sys::read_at(srcs, index)) else {
                return Err(Error::InvalidValue);
            };
            let size = sys::read_at(sizes, index).ok_or(Error::InvalidValue)?;
            copy::submit(stream, Copy::bytes(End::host(dst), End::host(src), size), false)?;
        }
        Ok(())
    }
    13000 fn cuMemcpy3DBatchAsync_v2(
        count: usize, list: *const u64, flags: u64, hStream: u64
    ) / cuMemcpy3DBatchAsync_v2_ptsz as own {
        let stream = stream(hStream, own);
        if stream == LEGACY || count == 0 || flags != 0 {
            return Err(Error::InvalidValue);
        }
        (0..count).try_for_each(|index| copy::submit(stream, batched(list.wrapping_add(14 * index))?, false))
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
