//! An AMD GPU that is not there: a fake HIP in this process, and the tree of files by which the compute driver would list it.

use std::path::Path;

use vm_ir::{Trust, text, validate};
use vm_passthrough::accelerator::rocm::assemble::Assembler;
use vm_passthrough::accelerator::rocm::fake::{Fake, FakeOptions, Kernel, install, know_symbols};
use vm_passthrough::accelerator::{CpuAccelerator, JitCompiler};

/// A device at an address in a host's sysfs, where there is LLVM to assemble for it.
pub(crate) fn gpu(sys: &Path, chip: &str, address: &str) -> Result<Fake, String> {
    Assembler::find().map_err(|error| error.to_string())?;
    assert!(install(), "HIP was asked for before");
    let (version, wavefront) = match chip {
        "gfx942" => (90402, 64),
        "gfx1100" => (110_000, 32),
        other => panic!("no version of {other} is known here"),
    };
    let nodes = sys.join("class/kfd/kfd/topology/nodes");
    let node = nodes.join(std::fs::read_dir(&nodes).map_or(0, Iterator::count).to_string());
    let bus = u32::from_str_radix(&address[5..7], 16).expect("a bus");
    let properties = format!(
        "simd_count 16\nlds_size_in_kb 64\nwave_front_size {wavefront}\nsimd_per_cu 4\ngfx_target_version {version}\n\
         vendor_id 4098\ndevice_id 29857\nlocation_id {}\ndomain 0\n",
        bus << 8
    );
    std::fs::create_dir_all(&node).expect("a folder");
    std::fs::write(node.join("gpu_id"), "7\n").expect("written");
    std::fs::write(node.join("properties"), properties).expect("written");
    let address = Some(address.to_owned());
    Ok(Fake::new(FakeOptions { architecture: chip.into(), wavefront, address, ..FakeOptions::default() }))
}

/// Has such devices run what this guest's module becomes.
pub(crate) fn know(chip: &str, source: &str) {
    let module = validate(text::parse(source).expect("a module"), Trust::Guest).expect("a valid one");
    let gpu = vm_jit::compile(&module, &format!("amdgcn:{chip}").parse().expect("a target")).expect("code");
    let cpu = JitCompiler::new(CpuAccelerator::new().expect("a processor").into());
    let cpu = cpu.compile_module(&module).expect("code");
    let kernels = gpu.entries.iter().zip(&cpu).map(|(gpu, cpu)| Kernel {
        symbol: gpu.symbol.clone(),
        params: gpu.params.clone(),
        cpu: cpu.artifact().clone(),
    });
    know_symbols(chip, kernels.collect());
}
