//! Contexts and peers.

use super::{Out, Unused, api, give};
use crate::{context, error::Error};

api! {
    3020 fn cuCtxCreate_v2(context: Out<u64>, flags: u32, device: i32) {
        give(context, || context::create(flags, device))
    }
    11040 fn cuCtxCreate_v3(context: Out<u64>, affinity: Unused, count: i32, flags: u32, device: i32) {
        if !affinity.is_null() || count != 0 {
            return Err(Error::NotSupported);
        }
        give(context, || context::create(flags, device))
    }
    12050 fn cuCtxCreate_v4(context: Out<u64>, parameters: Unused, flags: u32, device: i32) {
        if !parameters.is_null() {
            return Err(Error::NotSupported);
        }
        give(context, || context::create(flags, device))
    }
    4000 fn cuCtxDestroy_v2(context: u64) { context::destroy(context) }
    2000 fn cuCtxAttach(context: Out<u64>, flags: u32) { give(context, || context::attach(flags)) }
    2000 fn cuCtxDetach(context: u64) { context::detach(context) }
    4000 fn cuCtxPushCurrent_v2(context: u64) { context::push(context) }
    4000 fn cuCtxPopCurrent_v2(context: Out<u64>) {
        let popped = context::pop()?;
        super::put(context, popped);
        Ok(())
    }
    4000 fn cuCtxSetCurrent(context: u64) { context::set_current(context) }
    4000 fn cuCtxGetCurrent(context: Out<u64>) { give(context, context::get_current) }
    2000 fn cuCtxGetDevice(device: Out<i32>) { give(device, context::device) }
    13000 fn cuCtxGetDevice_v2(device: Out<i32>, context: u64) { give(device, || context::device_of(context)) }
    2000 fn cuCtxSynchronize() { context::synchronize(0) }
    13000 fn cuCtxSynchronize_v2(context: u64) { context::synchronize(context) }
    7000 fn cuCtxGetFlags(flags: Out<u32>) { give(flags, context::flags) }
    12010 fn cuCtxSetFlags(flags: u32) { context::set_flags(flags) }
    12000 fn cuCtxGetId(context: u64, id: Out<u64>) { give(id, || context::id_of(context)) }
    3020 fn cuCtxGetApiVersion(context: u64, version: Out<u32>) {
        give(version, || context::id_of(context).map(|_| 3020))
    }
    3010 fn cuCtxSetLimit(limit: i32, value: usize) { context::limit(limit, Some(value)).map(drop) }
    3010 fn cuCtxGetLimit(value: Out<usize>, limit: i32) { give(value, || context::limit(limit, None)) }
    3020 fn cuCtxGetCacheConfig(config: Out<i32>) { give(config, || context::device().map(|_| 0)) }
    3020 fn cuCtxSetCacheConfig(config: i32) {
        if (0..=3).contains(&config) { context::device().map(drop) } else { Err(Error::InvalidValue) }
    }
    5050 fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        context::device()?;
        super::put(least, 0);
        super::put(greatest, -5);
        Ok(())
    }
    11000 fn cuCtxResetPersistingL2Cache() { context::device().map(drop) }
    7000 fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) {
        give(context, || context::retain_primary(device))
    }
    7000 fn cuDevicePrimaryCtxRelease(device: i32) { context::release_primary(device) }
    11000 fn cuDevicePrimaryCtxRelease_v2(device: i32) { context::release_primary(device) }
    7000 fn cuDevicePrimaryCtxReset(device: i32) { context::reset_primary(device) }
    11000 fn cuDevicePrimaryCtxReset_v2(device: i32) { context::reset_primary(device) }
    7000 fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) { context::set_primary_flags(device, flags) }
    11000 fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) { context::set_primary_flags(device, flags) }
    7000 fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let (now, state) = context::primary_state(device)?;
        give(flags, || Ok(now))?;
        give(active, || Ok(state))
    }
    4000 fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        give(can, || context::can_access(device, peer))
    }
    8000 fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: i32, device: i32, peer: i32) {
        give(value, || {
            let can = context::can_access(device, peer)?;
            match attribute {
                1 => Ok(0),
                2..=4 if can == 0 => Err(Error::InvalidDevice),
                2 => Ok(can),
                3 | 4 => Ok(0),
                _ => Err(Error::InvalidValue),
            }
        })
    }
    4000 fn cuCtxEnablePeerAccess(peer: u64, flags: u32) { context::enable_peer(peer, flags) }
    4000 fn cuCtxDisablePeerAccess(peer: u64) { context::disable_peer(peer) }
}
