//! Streams, events, and memory operations of streams.

use super::{Out, api, give, graphs::list, put, stream};
use crate::{
    capture,
    error::Error,
    event,
    stream::{self as streams, Work},
    sys::{Callback, HostFunction},
};

api! {
    2000 fn cuStreamCreate(phStream: Out<u64>, flags: u32) { give(phStream, || streams::create(flags, 0)) }
    5050 fn cuStreamCreateWithPriority(phStream: Out<u64>, flags: u32, priority: i32) {
        give(phStream, || streams::create(flags, priority))
    }
    4000 fn cuStreamDestroy_v2(hStream: u64) { streams::destroy(hStream) }
    2000 fn cuStreamSynchronize(hStream: u64) / cuStreamSynchronize_ptsz as own {
        streams::synchronize(stream(hStream, own))
    }
    2000 fn cuStreamQuery(hStream: u64) / cuStreamQuery_ptsz as own { streams::query(stream(hStream, own)) }
    3020 fn cuStreamWaitEvent(hStream: u64, hEvent: u64, flags: u32) / cuStreamWaitEvent_ptsz as own {
        event::wait(stream(hStream, own), hEvent, flags)
    }
    5050 fn cuStreamGetFlags(hStream: u64, flags: Out<u32>) / cuStreamGetFlags_ptsz as own {
        give(flags, || Ok(streams::facts(stream(hStream, own))?.0))
    }
    5050 fn cuStreamGetPriority(hStream: u64, priority: Out<i32>) / cuStreamGetPriority_ptsz as own {
        give(priority, || Ok(streams::facts(stream(hStream, own))?.1))
    }
    9020 fn cuStreamGetCtx(hStream: u64, context: Out<u64>) / cuStreamGetCtx_ptsz as own {
        give(context, || Ok(streams::facts(stream(hStream, own))?.2))
    }
    12050 fn cuStreamGetCtx_v2(hStream: u64, context: Out<u64>, green: Out<u64>) / cuStreamGetCtx_v2_ptsz as own {
        give(context, || Ok(streams::facts(stream(hStream, own))?.2))?;
        put(green, 0);
        Ok(())
    }
    12000 fn cuStreamGetId(hStream: u64, id: Out<u64>) / cuStreamGetId_ptsz as own {
        give(id, || Ok(streams::facts(stream(hStream, own))?.3))
    }
    12080 fn cuStreamGetDevice(hStream: u64, device: Out<i32>) / cuStreamGetDevice_ptsz as own {
        give(device, || crate::context::device_of(streams::facts(stream(hStream, own))?.2))
    }
    10000 fn cuLaunchHostFunc(
        hStream: u64, function: Option<HostFunction>, data: u64
    ) / cuLaunchHostFunc_ptsz as own {
        let function = function.ok_or(Error::InvalidValue)?;
        streams::submit(stream(hStream, own), Work::Host { function, data })
    }
    13010 fn cuLaunchHostFunc_v2(
        hStream: u64, function: Option<HostFunction>, data: u64, mode: u32
    ) / cuLaunchHostFunc_v2_ptsz as own {
        if mode > 1 {
            return Err(Error::InvalidValue);
        }
        let function = function.ok_or(Error::InvalidValue)?;
        streams::submit(stream(hStream, own), Work::Host { function, data })
    }
    5000 fn cuStreamAddCallback(
        hStream: u64, callback: Option<Callback>, data: u64, flags: u32
    ) / cuStreamAddCallback_ptsz as own {
        streams::add_callback(stream(hStream, own), callback.ok_or(Error::InvalidValue)?, data, flags)
    }
    11070 fn cuStreamWaitValue32_v2(
        hStream: u64, addr: u64, value: u32, flags: u32
    ) / cuStreamWaitValue32_v2_ptsz as own {
        streams::submit(stream(hStream, own), Work::Wait { at: addr, value: value.into(), wide: false, flags })
    }
    8000 fn cuStreamWaitValue32(
        hStream: u64, addr: u64, value: u32, flags: u32
    ) / cuStreamWaitValue32_ptsz as own {
        streams::submit(stream(hStream, own), Work::Wait { at: addr, value: value.into(), wide: false, flags })
    }
    11070 fn cuStreamWaitValue64_v2(
        hStream: u64, addr: u64, value: u64, flags: u32
    ) / cuStreamWaitValue64_v2_ptsz as own {
        streams::submit(stream(hStream, own), Work::Wait { at: addr, value, wide: true, flags })
    }
    9000 fn cuStreamWaitValue64(
        hStream: u64, addr: u64, value: u64, flags: u32
    ) / cuStreamWaitValue64_ptsz as own {
        streams::submit(stream(hStream, own), Work::Wait { at: addr, value, wide: true, flags })
    }
    11070 fn cuStreamWriteValue32_v2(
        hStream: u64, addr: u64, value: u32, flags: u32
    ) / cuStreamWriteValue32_v2_ptsz as own {
        let _ = flags;
        streams::submit(stream(hStream, own), Work::Write { at: addr, value: value.into(), wide: false })
    }
    8000 fn cuStreamWriteValue32(
        hStream: u64, addr: u64, value: u32, flags: u32
    ) / cuStreamWriteValue32_ptsz as own {
        let _ = flags;
        streams::submit(stream(hStream, own), Work::Write { at: addr, value: value.into(), wide: false })
    }
    11070 fn cuStreamWriteValue64_v2(
        hStream: u64, addr: u64, value: u64, flags: u32
    ) / cuStreamWriteValue64_v2_ptsz as own {
        let _ = flags;
        streams::submit(stream(hStream, own), Work::Write { at: addr, value, wide: true })
    }
    9000 fn cuStreamWriteValue64(
        hStream: u64, addr: u64, value: u64, flags: u32
    ) / cuStreamWriteValue64_ptsz as own {
        let _ = flags;
        streams::submit(stream(hStream, own), Work::Write { at: addr, value, wide: true })
    }

    2000 fn cuEventCreate(phEvent: Out<u64>, flags: u32) { give(phEvent, || event::create(flags)) }
    4000 fn cuEventDestroy_v2(hEvent: u64) { event::destroy(hEvent) }
    2000 fn cuEventRecord(hEvent: u64, hStream: u64) / cuEventRecord_ptsz as own {
        event::record(hEvent, stream(hStream, own))
    }
    11010 fn cuEventRecordWithFlags(hEvent: u64, hStream: u64, flags: u32) / cuEventRecordWithFlags_ptsz as own {
        if flags & !1 != 0 {
            return Err(Error::InvalidValue);
        }
        event::record(hEvent, stream(hStream, own))
    }
    2000 fn cuEventQuery(hEvent: u64) { event::query(hEvent) }
    2000 fn cuEventSynchronize(hEvent: u64) { event::synchronize(hEvent) }
    2000 fn cuEventElapsedTime(ms: Out<f32>, hStart: u64, hEnd: u64) { give(ms, || event::elapsed(hStart, hEnd)) }
    12080 fn cuEventElapsedTime_v2(ms: Out<f32>, hStart: u64, hEnd: u64) { give(ms, || event::elapsed(hStart, hEnd)) }

    10010 fn cuThreadExchangeStreamCaptureMode(mode: *mut i32) {
        let wanted = crate::sys::read(mode.cast_const()).ok_or(Error::InvalidValue)?;
        crate::sys::write(mode, capture::exchange_mode(wanted)?).ok_or(Error::InvalidValue)
    }
    10000 fn cuStreamBeginCapture(hStream: u64) / cuStreamBeginCapture_ptsz as own {
        capture::begin(stream(hStream, own), 0)
    }
    10010 fn cuStreamBeginCapture_v2(hStream: u64, mode: i32) / cuStreamBeginCapture_v2_ptsz as own {
        capture::begin(stream(hStream, own), mode)
    }
    10000 fn cuStreamEndCapture(hStream: u64, phGraph: Out<u64>) / cuStreamEndCapture_ptsz as own {
        let out = phGraph.ok_or(Error::InvalidValue)?;
        let ended = capture::end(stream(hStream, own));
        out.write(ended.unwrap_or(0));
        ended.map(drop)
    }
    10000 fn cuStreamIsCapturing(hStream: u64, status: Out<i32>) / cuStreamIsCapturing_ptsz as own {
        give(status, || Ok(capture::status(stream(hStream, own))?.0))
    }
    10010 fn cuStreamGetCaptureInfo(
        hStream: u64, status: Out<i32>, id: Out<u64>
    ) / cuStreamGetCaptureInfo_ptsz as own {
        let (now, number, _) = capture::status(stream(hStream, own))?;
        give(status, || Ok(now))?;
        put(id, number);
        Ok(())
    }
    11030 fn cuStreamGetCaptureInfo_v2(
        hStream: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, count: Out<usize>
    ) / cuStreamGetCaptureInfo_v2_ptsz as own {
        let (now, number, made) = capture::status(stream(hStream, own))?;
        give(status, || Ok(now))?;
        put(id, number);
        put(graph, made);
        let (last, many) = capture::last(stream(hStream, own))?;
        put(dependencies, last);
        put(count, many);
        Ok(())
    }
    12030 fn cuStreamGetCaptureInfo_v3(
        hStream: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, edges: Out<u64>,
        count: Out<usize>
    ) / cuStreamGetCaptureInfo_v3_ptsz as own {
        let (now, number, made) = capture::status(stream(hStream, own))?;
        give(status, || Ok(now))?;
        put(id, number);
        put(graph, made);
        let (last, many) = capture::last(stream(hStream, own))?;
        put(dependencies, last);
        put(edges, 0);
        put(count, many);
        Ok(())
    }
    11030 fn cuStreamUpdateCaptureDependencies(
        hStream: u64, nodes: *const u64, count: usize, flags: u32
    ) / cuStreamUpdateCaptureDependencies_ptsz as own {
        capture::update(stream(hStream, own), list(nodes, count)?, flags)
    }
    12030 fn cuStreamUpdateCaptureDependencies_v2(
        hStream: u64, nodes: *const u64, data: *const u64, count: usize, flags: u32
    ) / cuStreamUpdateCaptureDependencies_v2_ptsz as own {
        let _ = data;
        capture::update(stream(hStream, own), list(nodes, count)?, flags)
    }
}
