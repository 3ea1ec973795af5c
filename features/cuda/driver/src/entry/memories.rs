//! Memory of all kinds, and what is known of addresses.

use super::{Out, Unused, api, give, put, read, stream};
use crate::{
    array,
    error::{Error, Result},
    ffi::{AccessOf, ArrayDescriptor, ArrayDescriptor3d, Location, PoolProperties, Properties},
    host, ipc, memory,
    pointer::{self, Value},
    pool, sys, virtual_memory,
};
use std::ffi::c_void;
use vm_cuda_api::hints;

/// Writes an attribute's value in its C type.
fn put_value(at: *mut c_void, value: Value) -> Result {
    match value {
        Value::Int(value) => sys::write(at.cast(), value),
        Value::Long(value) => sys::write(at.cast(), value),
        Value::Pair(value) => sys::write(at.cast(), value),
    }
    .ok_or(Error::InvalidValue)
}

/// Writes numbers one after the other.
fn put_numbers(to: *mut c_void, numbers: &[i32]) -> Result {
    let mut place = to.cast::<i32>();
    for number in numbers {
        sys::write(place, *number).ok_or(Error::InvalidValue)?;
        place = place.wrapping_add(1);
    }
    Ok(())
}

api! {
    3020 fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (available, all) = memory::info()?;
        put(free, available);
        put(total, all);
        Ok(())
    }
    3020 fn cuMemAlloc_v2(dptr: Out<u64>, bytesize: usize) { give(dptr, || memory::alloc(bytesize)) }
    3020 fn cuMemAllocPitch_v2(dptr: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        let (dptr, pitch) = (dptr.ok_or(Error::InvalidValue)?, pitch.ok_or(Error::InvalidValue)?);
        let (at, bytes) = memory::alloc_pitch(width, height, element)?;
        dptr.write(at);
        pitch.write(bytes);
        Ok(())
    }
    3020 fn cuMemFree_v2(dptr: u64) { memory::free(dptr) }
    3020 fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, dptr: u64) {
        let (start, len) = memory::address_range(dptr)?;
        put(base, start);
        put(size, len);
        Ok(())
    }
    6000 fn cuMemAllocManaged(dptr: Out<u64>, bytesize: usize, flags: u32) {
        give(dptr, || memory::alloc_managed(bytesize, flags))
    }
    3020 fn cuMemAllocHost_v2 (pp: Out<u64>, bytesize: usize) { give(pp, || host::alloc(bytesize, 0)) }
    2000 fn cuMemFreeHost(p: u64) { host::free(p) }
    2020 fn cuMemHostAlloc(pp: Out<u64>, bytesize: usize, flags: u32) { give(pp, || host::alloc(bytesize, flags)) }
    3020 fn cuMemHostGetDevicePointer_v2(dptr: Out<u64>, p: u64, flags: u32) {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        give(dptr, || host::device_pointer(p))
    }
    2030 fn cuMemHostGetFlags(flags: Out<u32>, p: u64) { give(flags, || host::flags(p)) }
    6050 fn cuMemHostRegister_v2(p: u64, bytesize: usize, flags: u32) { host::register(p, bytesize, flags) }
    4000 fn cuMemHostUnregister(p: u64) { host::unregister(p) }

    10020 fn cuMemGetAllocationGranularity(size: Out<usize>, prop: *const Properties, option: i32) {
        give(size, || virtual_memory::granularity(&read(prop)?, option))
    }
    10020 fn cuMemCreate(handle: Out<u64>, size: usize, prop: *const Properties, flags: u64) {
        give(handle, || virtual_memory::create(size, &read(prop)?, flags))
    }
    10020 fn cuMemRelease(handle: u64) { virtual_memory::release(handle) }
    11000 fn cuMemRetainAllocationHandle(handle: Out<u64>, addr: u64) {
        give(handle, || virtual_memory::retain(addr))
    }
    10020 fn cuMemGetAllocationPropertiesFromHandle(prop: Out<Properties>, handle: u64) {
        give(prop, || virtual_memory::properties(handle))
    }
    10020 fn cuMemAddressReserve(ptr: Out<u64>, size: usize, alignment: usize, addr: u64, flags: u64) {
        give(ptr, || virtual_memory::reserve(size, alignment, addr, flags))
    }
    10020 fn cuMemAddressFree(ptr: u64, size: usize) { virtual_memory::address_free(ptr, size) }
    10020 fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        virtual_memory::map(ptr, size, offset, handle, flags)
    }
    11010 fn cuMemMapArrayAsync(list: Unused, count: u32, hStream: u64) / cuMemMapArrayAsync_ptsz as own {
        let _ = (list, count, stream(hStream, own));
        Err(Error::NotSupported)
    }
    10020 fn cuMemUnmap(ptr: u64, size: usize) { virtual_memory::unmap(ptr, size) }
    10020 fn cuMemSetAccess(ptr: u64, size: usize, desc: *const AccessOf, count: usize) {
        if count > 1024 {
            return Err(Error::InvalidValue);
        }
        let descriptions: Option<Vec<_>> = (0..count).map(|at| sys::read_at(desc, at)).collect();
        virtual_memory::set_access(ptr, size, &descriptions.ok_or(Error::InvalidValue)?)
    }
    10020 fn cuMemGetAccess(flags: Out<u64>, location: *const Location, ptr: u64) {
        give(flags, || virtual_memory::access(ptr, read(location)?))
    }
    10020 fn cuMemExportToShareableHandle(shareable: Out<i32>, handle: u64, kind: i32, flags: u64) {
        give(shareable, || virtual_memory::export(handle, kind, flags))
    }
    10020 fn cuMemImportFromShareableHandle(handle: Out<u64>, shareable: u64, kind: i32) {
        give(handle, || virtual_memory::import(shareable, kind))
    }
    11070 fn cuMemGetHandleForAddressRange(handle: Out<i32>, dptr: u64, size: usize, kind: i32, flags: u64) {
        let _ = (handle, dptr, size, kind, flags);
        Err(Error::NotSupported)
    }

    11020 fn cuMemAllocAsync(dptr: Out<u64>, bytesize: usize, hStream: u64) / cuMemAllocAsync_ptsz as own {
        give(dptr, || pool::alloc(bytesize, None, stream(hStream, own)))
    }
    11020 fn cuMemAllocFromPoolAsync(
        dptr: Out<u64>, bytesize: usize, pool: u64, hStream: u64
    ) / cuMemAllocFromPoolAsync_ptsz as own {
        give(dptr, || pool::alloc(bytesize, Some(pool), stream(hStream, own)))
    }
    11020 fn cuMemFreeAsync(dptr: u64, hStream: u64) / cuMemFreeAsync_ptsz as own {
        pool::free(dptr, stream(hStream, own))
    }
    11020 fn cuMemPoolCreate(pool: Out<u64>, props: *const PoolProperties) {
        give(pool, || {
            let properties = read(props)?;
            if properties.kind != 1 || properties.location.kind != 1 {
                return Err(Error::InvalidValue);
            }
            if properties.handle_types != 0 {
                return Err(Error::NotSupported);
            }
            pool::create(properties.location.id, properties.max_size)
        })
    }
    11020 fn cuMemPoolDestroy(pool: u64) { pool::destroy(pool) }
    11020 fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        pool::trim(pool, keep)
    }
    11020 fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: *mut c_void) {
        let (int, found) = pool::attribute(pool, attribute)?;
        put_value(value, if int { Value::Int(found as u32) } else { Value::Long(found) })
    }
    11020 fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: *const c_void) {
        pool::set_attribute(pool, attribute, |int| {
            if int { sys::read(value.cast::<u32>()).map(u64::from) } else { sys::read(value.cast::<u64>()) }
        })
    }
    11020 fn cuMemPoolSetAccess(pool: u64, map: *const AccessOf, count: usize) {
        let _ = (map, count);
        pool::known(pool)
    }
    11020 fn cuMemPoolGetAccess(flags: Out<i32>, pool: u64, location: *const Location) {
        give(flags, || read(location).and_then(|_| pool::known(pool)).map(|()| 3))
    }

    3020 fn cuArrayCreate_v2(array: Out<u64>, descriptor: *const ArrayDescriptor) {
        give(array, || {
            let ArrayDescriptor { sides: [width, height], format, channels } = read(descriptor)?;
            array::create(&ArrayDescriptor3d { sides: [width, height, 0], format, channels, flags: 0, end: 0 }, None)
        })
    }
    3020 fn cuArray3DCreate_v2(array: Out<u64>, descriptor: *const ArrayDescriptor3d) {
        give(array, || array::create(&read(descriptor)?, None))
    }
    5000 fn cuMipmappedArrayCreate(array: Out<u64>, descriptor: *const ArrayDescriptor3d, levels: u32) {
        give(array, || array::create(&read(descriptor)?, Some(levels)))
    }
    2000 fn cuArrayDestroy(array: u64) { array::destroy(array, false) }
    5000 fn cuMipmappedArrayDestroy(array: u64) { array::destroy(array, true) }

    4010 fn cuIpcGetMemHandle(handle: Out<ipc::Handle>, dptr: u64) { give(handle, || ipc::handle(dptr)) }
    // The handle is passed by value: as a structure in memory.
    11000 fn cuIpcOpenMemHandle_v2(dptr: Out<u64>, handle: Handle, flags: u32) {
        give(dptr, || ipc::open(&handle.0, flags))
    }
    4010 fn cuIpcOpenMemHandle(dptr: Out<u64>, handle: Handle, flags: u32) {
        give(dptr, || ipc::open(&handle.0, flags))
    }
    4010 fn cuIpcGetEventHandle(handle: Out<ipc::Handle>, event: u64) { give(handle, || ipc::event_handle(event)) }
    4010 fn cuIpcOpenEventHandle(event: Out<u64>, handle: Handle) { give(event, || ipc::open_event(&handle.0)) }
    4010 fn cuIpcCloseMemHandle(dptr: u64) { ipc::close(dptr) }

    4000 fn cuPointerGetAttribute(data: *mut c_void, attribute: i32, ptr: u64) {
        if data.is_null() {
            return Err(Error::InvalidValue);
        }
        put_value(data, pointer::attribute(attribute, ptr)?)
    }
    7000 fn cuPointerGetAttributes(count: u32, attributes: *const i32, data: *const u64, ptr: u64) {
        for at in 0..count.min(1024) as usize {
            let attribute = sys::read_at(attributes, at).ok_or(Error::InvalidValue)?;
            let place = sys::read_at(data, at).ok_or(Error::InvalidValue)?;
            let place = std::ptr::with_exposed_provenance_mut(place as usize);
            put_value(place, pointer::attribute_or_nothing(attribute, ptr)?)?;
        }
        Ok(())
    }
    6000 fn cuPointerSetAttribute(value: *const c_void, attribute: i32, ptr: u64) {
        pointer::set(attribute, ptr, sys::read(value.cast::<u32>()))
    }
    12020 fn cuMemAdvise_v2(dptr: u64, count: usize, advice: i32, location: u64) {
        memory::advise(dptr, count, advice, hints::Location::parse(location))
    }
    12020 fn cuMemPrefetchAsync_v2(dptr: u64, count: usize, location: u64, flags: u32, hStream: u64) / cuMemPrefetchAsync_v2_ptsz as own {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        memory::prefetch(dptr, count, hints::Location::parse(location), stream(hStream, own))
    }
    8000 fn cuMemAdvise(dptr: u64, count: usize, advice: i32, device: i32) {
        memory::advise(dptr, count, advice, Some(hints::Location::of_device(device)))
    }
    8000 fn cuMemPrefetchAsync(dptr: u64, count: usize, device: i32, hStream: u64) / cuMemPrefetchAsync_ptsz as own {
        memory::prefetch(dptr, count, Some(hints::Location::of_device(device)), stream(hStream, own))
    }
    8000 fn cuMemRangeGetAttribute(data: *mut c_void, dataSize: usize, attribute: i32, dptr: u64, count: usize) {
        put_numbers(data, &memory::range_attribute(dptr, count, attribute, dataSize)?)
    }
    8000 fn cuMemRangeGetAttributes(data: *const u64, dataSizes: *const usize, attributes: *const i32, numAttributes: usize, dptr: u64, count: usize) {
        for at in 0..numAttributes.min(1024) {
            let word = |place: *const u64| sys::read_at(place, at).ok_or(Error::InvalidValue);
            let (place, size) = (word(data)?, word(dataSizes.cast())?);
            let attribute = sys::read_at(attributes, at).ok_or(Error::InvalidValue)?;
            let place = std::ptr::with_exposed_provenance_mut(place as usize);
            put_numbers(place, &memory::range_attribute(dptr, count, attribute, size as usize)?)?;
        }
        Ok(())
    }
    6000 fn cuStreamAttachMemAsync(hStream: u64, dptr: u64, length: usize, flags: u32) / cuStreamAttachMemAsync_ptsz as own {
        memory::attach(dptr, length, flags, stream(hStream, own))
    }
}

/// A `CUipcMemHandle`, by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle(ipc::Handle);

impl super::Argument for Handle {
    fn show(&self) -> String {
        "(64 bytes)".to_owned()
    }
}
