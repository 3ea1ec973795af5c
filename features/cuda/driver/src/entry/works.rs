//! Modules, functions, and launches.

use super::{Out, Unused, api, give, put, read, stream};
use crate::{
    error::{Error, Result},
    ffi::Launch,
    image,
    jit::Options,
    library, link,
    module::{self, Refusal, Request},
    occupancy,
    sys::{self, SharedOf},
};
use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_void},
    sync::{Mutex, PoisonError},
};

/// The name of a function or kernel, which is there as long as the process is.
fn name(handle: u64) -> Result<u64> {
    static NAMES: Mutex<BTreeMap<String, CString>> = Mutex::new(BTreeMap::new());
    let name = module::name(handle)?;
    let text = CString::new(&*name).map_err(|_| Error::Unknown)?;
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(names.entry(name).or_insert(text).as_ptr().expose_provenance() as u64)
}

/// Writes as many handles as there is room for.
fn put_all(at: *mut u64, count: u32, handles: &[u64]) -> Result {
    let handles = handles.iter().take(count as usize).enumerate();
    handles
        .map(|(index, handle)| sys::write(at.wrapping_add(index), *handle))
        .collect::<Option<()>>()
        .ok_or(Error::InvalidValue)
}

api! {
    2000 fn cuModuleLoad(hModule: Out<u64>, path: *const c_char) { give(hModule, || Ok(module::load(|| module::file(path), None)?)) }
    2000 fn cuModuleLoadData(hModule: Out<u64>, image: u64) {
        give(hModule, || Ok(module::load(|| image::at(image), None)?))
    }
    2010 fn cuModuleLoadDataEx(
        hModule: Out<u64>, image: u64, count: u32, options: *const i32, values: *const *const c_void
    ) {
        let mut options = Options::read(count, options, values);
        give(hModule, || options.logged(module::load(|| image::at(image), options.max_registers)))
    }
    2000 fn cuModuleLoadFatBinary(hModule: Out<u64>, image: u64) {
        give(hModule, || Ok(module::load(|| image::at(image), None)?))
    }
    2000 fn cuModuleUnload(hModule: u64) { module::unload(hModule) }
    11070 fn cuModuleGetLoadingMode(mode: Out<i32>) { give(mode, || Ok(1)) }
    2000 fn cuModuleGetFunction(hFunction: Out<u64>, hModule: u64, name: *const c_char) {
        give(hFunction, || module::function(hModule, name))
    }
    3020 fn cuModuleGetGlobal_v2(dptr: Out<u64>, bytes: Out<usize>, hModule: u64, name: *const c_char) {
        let (at, size) = module::global(hModule, name)?;
        put(dptr, at);
        put(bytes, size);
        Ok(())
    }
    12040 fn cuModuleGetFunctionCount(count: Out<u32>, hModule: u64) {
        give(count, || Ok(module::functions(hModule)?.len() as u32))
    }
    12040 fn cuModuleEnumerateFunctions(functions: *mut u64, count: u32, hModule: u64) {
        put_all(functions, count, &module::functions(hModule)?)
    }
    12030 fn cuFuncGetName(text: Out<u64>, hFunction: u64) { give(text, || name(hFunction)) }
    12040 fn cuFuncIsLoaded(loaded: Out<i32>, hFunction: u64) { give(loaded, || module::name(hFunction).map(|_| 1)) }
    12040 fn cuFuncLoad(hFunction: u64) { module::name(hFunction).map(drop) }
    13020 fn cuFuncGetParamCount(hFunction: u64, count: Out<usize>) {
        give(count, || Ok(module::parameters(hFunction)?.len()))
    }
    13020 fn cuKernelGetParamCount(kernel: u64, count: Out<usize>) {
        give(count, || Ok(module::parameters(kernel)?.len()))
    }
    2020 fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, hFunction: u64) {
        give(value, || module::attribute(hFunction, attribute))
    }
    9000 fn cuFuncSetAttribute(hFunction: u64, attribute: i32, value: i32) {
        module::set_attribute(hFunction, attribute, value)
    }
    3000 fn cuFuncSetCacheConfig(hFunction: u64, config: i32) {
        let _ = config;
        module::name(hFunction).map(drop)
    }
    11000 fn cuFuncGetModule(hModule: Out<u64>, hFunction: u64) { give(hModule, || module::module_of(hFunction)) }
    12040 fn cuFuncGetParamInfo(hFunction: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        let (at, bytes) = module::parameter(hFunction, index)?;
        give(offset, || Ok(at))?;
        put(size, bytes);
        Ok(())
    }
    12000 fn cuLibraryLoadData(
        library: Out<u64>, image: u64, options: *const i32, values: *const *const c_void, count: u32,
        kinds: Unused, more: Unused, many: u32
    ) {
        let _ = (kinds, more);
        // The runtime loads the image of its program with an option of libraries.
        let is_runtimes = many > 0 && image::is_wrapped(image);
        let image = || image::at(image).map_err(Refusal::from);
        let mut options = Options::read(count, options, values);
        give(library, || {
            options.logged(image().and_then(|image| library::load(image, is_runtimes, options.max_registers)))
        })
    }
    12000 fn cuLibraryLoadFromFile(
        library: Out<u64>, path: *const c_char, options: *const i32, values: *const *const c_void, count: u32,
        kinds: Unused, more: Unused, many: u32
    ) {
        let _ = (kinds, more, many);
        let image = module::file(path)?;
        let mut options = Options::read(count, options, values);
        give(library, || options.logged(library::load(image, false, options.max_registers)))
    }
    12000 fn cuLibraryGetGlobal(dptr: Out<u64>, bytes: Out<usize>, library: u64, name: *const c_char) {
        let (at, size) = module::global(library::module(library)?, name)?;
        put(dptr, at);
        put(bytes, size);
        Ok(())
    }
    12000 fn cuLibraryGetManaged(dptr: Out<u64>, bytes: Out<usize>, library: u64, name: *const c_char) {
        let (at, size) = library::managed(library, name)?;
        put(dptr, at);
        put(bytes, size);
        Ok(())
    }
    12040 fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) {
        give(count, || Ok(library::kernels(library)?.len() as u32))
    }
    12040 fn cuLibraryEnumerateKernels(kernels: *mut u64, count: u32, library: u64) {
        put_all(kernels, count, &library::kernels(library)?)
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
    12000 fn cuKernelSetAttribute(attribute: i32, value: i32, kernel: u64, device: i32) {
        let _ = device;
        module::set_attribute(kernel, attribute, value)
    }
    12000 fn cuKernelSetCacheConfig(kernel: u64, config: i32, device: i32) {
        let _ = (config, device);
        module::name(kernel).map(drop)
    }
    12030 fn cuKernelGetName(text: Out<u64>, kernel: u64) { give(text, || name(kernel)) }
    12040 fn cuKernelGetParamInfo(kernel: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        let (at, bytes) = module::parameter(kernel, index)?;
        give(offset, || Ok(at))?;
        put(size, bytes);
        Ok(())
    }
    6050 fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, hFunction: u64, block: i32, shared: usize
    ) {
        give(blocks, || module::name(hFunction).map(|_| occupancy::resident(block, shared)))
    }
    7000 fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, hFunction: u64, block: i32, shared: usize, flags: u32
    ) {
        let _ = flags;
        give(blocks, || module::name(hFunction).map(|_| occupancy::resident(block, shared)))
    }
    6050 fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, hFunction: u64, shared_of: Option<SharedOf>, shared: usize, limit: i32
    ) {
        module::name(hFunction)?;
        let (blocks, threads) = occupancy::most(shared_of, shared, limit)?;
        give(grid, || Ok(blocks))?;
        give(block, || Ok(threads))
    }
    7000 fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, hFunction: u64, shared_of: Option<SharedOf>, shared: usize, limit: i32, flags: u32
    ) {
        let _ = flags;
        module::name(hFunction)?;
        let (blocks, threads) = occupancy::most(shared_of, shared, limit)?;
        give(grid, || Ok(blocks))?;
        give(block, || Ok(threads))
    }
    11070 fn cuOccupancyMaxActiveClusters(clusters: Out<i32>, hFunction: u64, config: *const Launch) {
        module::name(hFunction)?;
        give(clusters, || occupancy::clusters(&read(config)?))
    }
    11070 fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, hFunction: u64, config: *const Launch) {
        module::name(hFunction)?;
        read(config)?;
        give(size, || Ok(8))
    }
    10020 fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, hFunction: u64, blocks: i32, block: i32) {
        let _ = (blocks, block);
        give(bytes, || module::name(hFunction).map(|_| 48 << 10))
    }
    4000 fn cuLaunchKernel(
        f: u64, gridX: u32, gridY: u32, gridZ: u32, blockX: u32, blockY: u32, blockZ: u32, shared: u32,
        hStream: u64, parameters: *const *const c_void, extra: Unused
    ) / cuLaunchKernel_ptsz as own {
        let (grid, block) = ([gridX, gridY, gridZ], [blockX, blockY, blockZ]);
        let stream = stream(hStream, own);
        module::launch(&Request { function: f, grid, block, shared, stream, cooperative: false, parameters, extra })
    }
    9000 fn cuLaunchCooperativeKernel(
        f: u64, gridX: u32, gridY: u32, gridZ: u32, blockX: u32, blockY: u32, blockZ: u32, shared: u32,
        hStream: u64, parameters: *const *const c_void
    ) / cuLaunchCooperativeKernel_ptsz as own {
        let (grid, block) = ([gridX, gridY, gridZ], [blockX, blockY, blockZ]);
        let (stream, extra) = (stream(hStream, own), std::ptr::null());
        module::launch(&Request { function: f, grid, block, shared, stream, cooperative: true, parameters, extra })
    }
    11060 fn cuLaunchKernelEx(
        config: *const Launch, f: u64, parameters: *const *const c_void, extra: Unused
    ) / cuLaunchKernelEx_ptsz as own {
        let Launch { grid, block, shared, stream: handle, .. } = read(config)?;
        let stream = stream(handle, own);
        module::launch(&Request { function: f, grid, block, shared, stream, cooperative: false, parameters, extra })
    }
    5050 fn cuLinkCreate(count: u32, options: *const i32, values: *const *const c_void, state: Out<u64>) {
        give(state, || link::create(Options::read(count, options, values)))
    }
    6050 fn cuLinkCreate_v2(count: u32, options: *const i32, values: *const *const c_void, state: Out<u64>) {
        give(state, || link::create(Options::read(count, options, values)))
    }
    5050 fn cuLinkAddData(
        state: u64, kind: i32, data: *const c_void, size: usize, called: *const c_char, count: u32, options: Unused,
        values: Unused
    ) {
        let _ = (count, options, values);
        link::add(state, kind, data, size, called)
    }
    6050 fn cuLinkAddData_v2(
        state: u64, kind: i32, data: *const c_void, size: usize, called: *const c_char, count: u32, options: Unused,
        values: Unused
    ) {
        let _ = (count, options, values);
        link::add(state, kind, data, size, called)
    }
    5050 fn cuLinkAddFile(state: u64, kind: i32, path: *const c_char, count: u32, options: Unused, values: Unused) {
        let _ = (count, options, values);
        link::add_file(state, kind, path)
    }
    6050 fn cuLinkAddFile_v2(state: u64, kind: i32, path: *const c_char, count: u32, options: Unused, values: Unused) {
        let _ = (count, options, values);
        link::add_file(state, kind, path)
    }
    5050 fn cuLinkComplete(state: u64, image: Out<u64>, size: Out<usize>) {
        let (at, bytes) = link::complete(state)?;
        give(image, || Ok(at))?;
        put(size, bytes);
        Ok(())
    }
    5050 fn cuLinkDestroy(state: u64) { link::destroy(state) }
    4000 fn cuProfilerStart() { Ok(()) }
    4000 fn cuProfilerStop() { Ok(()) }
}
