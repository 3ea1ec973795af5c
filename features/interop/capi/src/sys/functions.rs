//! The functions of the kernel library's table, as `build.rs` writes them.
#![allow(
    non_snake_case,
    clippy::useless_conversion,
    clippy::missing_safety_doc,
    clippy::too_many_arguments,
    clippy::not_unsafe_ptr_arg_deref
)]

use std::ffi::{c_float, c_int, c_void};

use vm_ir::Scalar;
use vm_kernels::functions::{Kind, MAKERS, Parameter, Spec};

use super::abi::{vmk_bf16, vmk_f16, vmk_status};
use super::run::{run, workspace_size};

include!(concat!(env!("OUT_DIR"), "/functions.rs"));
