//! Modules, functions, and launches.

use super::{Out, Unused, api, give, put, read, stream};
use crate::{ffi::Launch, library, module};
use std::ffi::c_char;

api! {
    2000 fn cuModuleLoad(hModule: Out<u64>, path: *const c_char) { give(hModule, || module::load_file(path)) }
    2000 fn cuModuleLoadData(hModule: Out<u64>, image: *const c_char) { give(hModule, || module::load(image)) }
    2010 fn cuModuleLoadDataEx(
        hModule: Out<u64>, image: *const c_char, count: u32, options: Unused, values: Unused
    ) {
        let _ = (count, options, values);
        give(hModule, || module::load(image))
    }
    2000 fn cuModuleLoadFatBinary(hModule: Out<u64>, image: *const c_char) { give(hModule, || module::load(image)) }
    2000 fn cuModuleUnload(hModule: u64) { module::unload(hModule) }
    11070 fn cuModuleGetLoadingMode(mode: Out<i32>) { give(mode, || Ok(1)) }
    2000 fn cuModuleGetFunction(hFunction: Out<u64>, hModule: u64, name: *const c_char) {
        give(hFunction, || module::function(hModule, name))
    }
    3020 fn cuModuleGetGlobal_v2(dptr: Out<u64>, bytes: Out<usize>, hModule: u64, name: *const c_char) {
        let _ = (dptr, bytes, name);
        module::global(hModule)
    }
    2020 fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, hFunction: u64) {
        give(value, || module::attribute(hFunction, attribute))
    }
    9000 fn cuFuncSetAttribute(hFunction: u64, attribute: i32, value: i32) {
        let _ = value;
        module::attribute(hFunction, attribute).map(drop)
    }
    3000 fn cuFuncSetCacheConfig(hFunction: u64, config: i32) {
        let _ = config;
        module::module_of(hFunction).map(drop)
    }
    11000 fn cuFuncGetModule(hModule: Out<u64>, hFunction: u64) { give(hModule, || module::module_of(hFunction)) }
    12040 fn cuFuncGetParamInfo(hFunction: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        let (at, bytes) = module::parameter(hFunction, index)?;
        give(offset, || Ok(at))?;
        put(size, bytes);
        Ok(())
    }
    12000 fn cuLibraryLoadData(
        library: Out<u64>, image: *const c_char, options: Unused, values: Unused, count: u32, kinds: Unused,
        more: Unused, many: u32
    ) {
        let _ = (options, values, count, kinds, more, many);
        give(library, || library::load(image))
    }
    12000 fn cuLibraryUnload(library: u64) { library::unload(library) }
    12000 fn cuLibraryGetKernel(kernel: Out<u64>, library: u64, name: *const c_char) {
        give(kernel, || library::kernel(library, name))
    }
    12000 fn cuLibraryGetModule(hModule: Out<u64>, library: u64) { give(hModule, || library::module(library)) }
    12000 fn cuKernelGetFunction(hFunction: Out<u64>, kernel: u64) { give(hFunction, || library::function(kernel)) }
    12050 fn cuKernelGetLibrary(library: Out<u64>, kernel: u64) { give(library, || library::library_of(kernel)) }
    12000 fn cuKernelGetAttribute(value: Out<i32>, attribute: i32, kernel: u64, device: i32) {
        let _ = device;
        give(value, || module::attribute(kernel, attribute))
    }
    12040 fn cuKernelGetParamInfo(kernel: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        let (at, bytes) = module::parameter(kernel, index)?;
        give(offset, || Ok(at))?;
        put(size, bytes);
        Ok(())
    }
    6050 fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, hFunction: u64, block: i32, shared: usize
    ) {
        let _ = shared;
        give(blocks, || module::module_of(hFunction).map(|_| 2048 / block.clamp(1, 1024)))
    }
    7000 fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, hFunction: u64, block: i32, shared: usize, flags: u32
    ) {
        let _ = (shared, flags);
        give(blocks, || module::module_of(hFunction).map(|_| 2048 / block.clamp(1, 1024)))
    }
    4000 fn cuLaunchKernel(
        f: u64, gridX: u32, gridY: u32, gridZ: u32, blockX: u32, blockY: u32, blockZ: u32, shared: u32,
        hStream: u64, parameters: *const *const u64, extra: Unused
    ) / cuLaunchKernel_ptsz as own {
        let _ = shared;
        let (grid, block) = ([gridX, gridY, gridZ], [blockX, blockY, blockZ]);
        module::launch(f, grid, block, stream(hStream, own), parameters, extra)
    }
    9000 fn cuLaunchCooperativeKernel(
        f: u64, gridX: u32, gridY: u32, gridZ: u32, blockX: u32, blockY: u32, blockZ: u32, shared: u32,
        hStream: u64, parameters: *const *const u64
    ) / cuLaunchCooperativeKernel_ptsz as own {
        let _ = shared;
        let (grid, block) = ([gridX, gridY, gridZ], [blockX, blockY, blockZ]);
        module::launch(f, grid, block, stream(hStream, own), parameters, std::ptr::null())
    }
    11060 fn cuLaunchKernelEx(
        config: *const Launch, f: u64, parameters: *const *const u64, extra: Unused
    ) / cuLaunchKernelEx_ptsz as own {
        let config = read(config)?;
        module::launch(f, config.grid, config.block, stream(config.stream, own), parameters, extra)
    }
    4000 fn cuProfilerStart() { Ok(()) }
    4000 fn cuProfilerStop() { Ok(()) }
}
