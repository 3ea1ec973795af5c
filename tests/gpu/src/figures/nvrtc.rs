//! NVIDIA's run-time compiler for CUDA C++, a peer of the figures. <https://docs.nvidia.com/cuda/nvrtc/>
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, ensure};
use libloading::{Library, Symbol};

use crate::skip::skip;

type Program = *mut c_void;

/// The compiler.
pub(super) struct Nvrtc(Library);

impl Nvrtc {
    /// That of a file, or else the machine's.
    pub(super) fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let mut names: Vec<PathBuf> = file.map(Path::to_path_buf).into_iter().collect();
        if file.is_none() {
            let libraries = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
            names.extend(libraries.map(PathBuf::from));
            let homes =
                ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
            for home in homes.chain(["/usr/local/cuda".into()]) {
                names.extend(libraries.map(|library| home.join("lib64").join(library)));
            }
        }
        for name in &names {
            // SAFETY: its constructors are the vendor's, made to be loaded so.
            if let Ok(library) = unsafe { Library::new(name) } {
                return Ok(Self(library));
            }
        }
        skip("no NVRTC: name the file of libnvrtc with --nvrtc")
    }

    /// PTX of CUDA C++, or a cubin, as the architecture `compute_90` or `sm_90` says.
    pub(super) fn compile(&self, source: &str, architecture: &str) -> anyhow::Result<Vec<u8>> {
        let create: Symbol<
            unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int,
        > = self.symbol("nvrtcCreateProgram")?;
        let compile: Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
            self.symbol("nvrtcCompileProgram")?;
        let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
            self.symbol("nvrtcDestroyProgram")?;
        let is_cubin = architecture.starts_with("sm_");
        let (size, get) = if is_cubin {
            ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        } else {
            ("nvrtcGetPTXSize", "nvrtcGetPTX")
        };
        let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> = self.symbol(size)?;
        let get: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> = self.symbol(get)?;

        let source = CString::new(source)?;
        let option = CString::new(format!("--gpu-architecture={architecture}"))?;
        let options = [option.as_ptr()];
        let mut program = ptr::null_mut();
        // SAFETY: here and below: the strings end with a zero byte, the pointers are to locals, the program is live.
        let status = unsafe {
            create(&raw mut program, source.as_ptr(), c"k.cu".as_ptr(), 0, ptr::null(), ptr::null())
        };
        ensure!(status == 0, "nvrtcCreateProgram: {status}");
        // SAFETY: as above.
        let status = unsafe { compile(program, 1, options.as_ptr()) };
        ensure!(status == 0, "nvrtcCompileProgram: {status}");
        let mut bytes = 0;
        // SAFETY: as above.
        let status = unsafe { size(program, &raw mut bytes) };
        ensure!(status == 0, "the size of the code: {status}");
        let mut code = vec![0u8; bytes];
        // SAFETY: as above; it writes as many bytes as it said.
        let status = unsafe { get(program, code.as_mut_ptr().cast()) };
        ensure!(status == 0, "the code: {status}");
        // SAFETY: as above.
        unsafe { destroy(&raw mut program) };
        Ok(code)
    }

    fn symbol<T>(&self, name: &str) -> anyhow::Result<Symbol<'_, T>> {
        // SAFETY: the callers give the signatures of the library's header.
        unsafe { self.0.get(name.as_bytes()) }.with_context(|| name.to_owned())
    }
}
