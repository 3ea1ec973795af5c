//! What can be said to `compile` and `launch`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use vm_ir::Trust;
use vm_jit::Target;
use vm_passthrough::PciAddress;

use super::argument::{ArgSpec, OutSpec};
use crate::deadlines;

/// Arguments of `compile`.
#[derive(Debug, Args)]
pub(crate) struct CompileArgs {
    /// The kernels, as text (.vir) or in the binary form; or a model, for onnx
    #[arg(value_name = "FILE", required_unless_present = "list_targets")]
    pub(crate) file: Option<PathBuf>,
    /// What to compile for, as in ptx:sm_90a, amdgcn:gfx942 or cpu; onnx for a model
    #[arg(long, value_name = "TARGET", required_unless_present = "list_targets")]
    pub(crate) target: Option<TargetArg>,
    /// Compile nothing; list the targets that there are, and what each has
    #[arg(long, conflicts_with_all = ["file", "target", "output", "trusted", "legal"])]
    pub(crate) list_targets: bool,
    /// Where the code goes; without it, to standard output. A name that ends in .cubin, or in .hsaco or .co, asks for what a
    /// driver loads: a cubin of PTX, by ptxas, or a code object of LLVM IR, by LLVM
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: Option<PathBuf>,
    /// Compile it as the host's own, without the checks that a guest's kernel has
    #[arg(long)]
    pub(crate) trusted: bool,
    /// Compile nothing; list every op that the kernels use, and how the target does it
    #[arg(long, conflicts_with = "output")]
    pub(crate) legal: bool,
    /// Give up after SECONDS
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) deadline: Duration,
}

/// Arguments of `launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// The kernels, as text (.vir) or in the binary form; or a model (.vgr, or JSON)
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Where it runs: a GPU's PCI address, rocm:N for the AMD GPU of that number, cpu, or interpreter; a model also on an NPU, by
    /// its number in the list of them
    #[arg(long, value_name = "ADDR|rocm:N|npu:N|cpu|interpreter")]
    pub(crate) device: DeviceArg,
    /// Which kernel, where the file has several
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// Blocks along x, y and z; a model has none
    #[arg(long, value_name = "X[,Y[,Z]]", allow_hyphen_values = true)]
    pub(crate) grid: Option<GridArg>,
    /// What a parameter is given: x=f32[3,1000] (behind it =zeros, =ones, =arange or =random:SEED), x=@in.npy, or n=5
    #[arg(long = "arg", value_name = "NAME=VALUE", allow_hyphen_values = true)]
    pub(crate) args: Vec<ArgSpec>,
    /// Where a view goes after the launch
    #[arg(long = "out", value_name = "NAME=@FILE.npy")]
    pub(crate) outs: Vec<OutSpec>,
    /// Run it as the host's own, without the checks that a guest's kernel has
    #[arg(long)]
    pub(crate) trusted: bool,
    /// Run it on the interpreter as well, and compare what both wrote; a model is computed in f64 for that
    #[arg(long)]
    pub(crate) check: bool,
    /// Let accesses out of bounds, which --check finds, be no error
    #[arg(long, requires = "check")]
    pub(crate) allow_out_of_bounds: bool,
    /// How far --check lets floats differ, times the greater of 1 and the expected magnitude; without it, 1e-5 for f32 and
    /// f64, 1e-2 for smaller floats and for all of a model on an NPU, which may compute in f16
    #[arg(long, value_name = "BOUND", requires = "check", value_parser = bound, allow_negative_numbers = true)]
    pub(crate) tolerance: Option<f64>,
    /// Stop the kernel, and give up, after SECONDS
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) deadline: Duration,
    /// Stop a guest's kernel when a thread has begun N iterations of its loops
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) fuel: Option<u64>,
    /// Launch it N times more, each time on the arguments as they are given, and tell the median and the spread of how long
    /// these took
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) repeat: Option<u32>,
}

/// The trust that a module is validated for.
pub(crate) fn trust(trusted: bool) -> Trust {
    if trusted { Trust::Trusted } else { Trust::Guest }
}

pub(in crate::cli::kernel) fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = deadlines::seconds(text).ok();
    seconds.filter(|time| !time.is_zero()).ok_or("write seconds above 0, as in 2.5")
}

fn bound(text: &str) -> Result<f64, String> {
    let bound = text.parse().ok().filter(|bound: &f64| bound.is_finite() && *bound >= 0.0);
    bound.ok_or_else(|| "write a number from 0 on, as in 1e-6".into())
}

/// What is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TargetArg {
    /// Kernels, for a target of theirs.
    Kernels(Target),
    /// A model, as ONNX.
    Onnx,
}

impl FromStr for TargetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "onnx" => Ok(Self::Onnx),
            _ => text.parse().map(Self::Kernels).map_err(|error| format!("{error}; or onnx, for a model")),
        }
    }
}

/// Where a kernel or a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// On the reference interpreter.
    Interpreter,
    /// On this machine's CPU, compiled.
    Cpu,
    /// On the accelerator at a PCI address.
    Pci(PciAddress),
    /// On an AMD GPU, by its number in the order in which the compute driver lists them.
    Rocm(usize),
    /// On an NPU, by its number in the list of them.
    Npu(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "interpreter" => Ok(Self::Interpreter),
            "cpu" => Ok(Self::Cpu),
            _ => match text.split_once(':') {
                Some(("rocm", number)) => numbered(number, "an AMD GPU, as in rocm:0").map(Self::Rocm),
                Some(("npu", number)) => numbered(number, "an NPU, as in npu:0").map(Self::Npu),
                _ => text
                    .parse()
                    .map(Self::Pci)
                    .map_err(|error| format!("{error}; or write rocm:0, npu:0, cpu or interpreter")),
            },
        }
    }
}

fn numbered(number: &str, of: &str) -> Result<usize, String> {
    number.parse().map_err(|_| format!("`{number}` is no number of {of}"))
}

/// Blocks along x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridArg(pub(crate) [u32; 3]);

impl FromStr for GridArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut grid = [1; 3];
        let sizes: Vec<_> = text.split(',').collect();
        if sizes.len() > grid.len() {
            return Err(format!("{} sizes; a grid has x, y and z", sizes.len()));
        }
        for (axis, size) in grid.iter_mut().zip(sizes) {
            *axis = size.trim().parse().ok().filter(|size| *size > 0).ok_or_else(|| {
                format!("`{size}` is no number of blocks; write whole numbers from 1 on, as in 64,2")
            })?;
        }
        Ok(Self(grid))
    }
}
