//! What a kernel takes of a multiprocessor, and how long it is compiled.

use std::fmt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_ir::{Kernel, Module, Trust, validate};
use vm_jit::Target;

use crate::gpu::Gpu;
use crate::skip::skip;

/// Of a multiprocessor of Hopper: registers, bytes of shared memory, and those that a block takes beside its own.
const OF_UNIT: [u32; 3] = [65_536, 233_472, 1024];

/// A guest's kernel, as `ptxas` assembles it.
pub(super) struct Occupancy {
    registers: u32,
    threads: u32,
    /// Bytes.
    pub(super) spills: u32,
    shared: u32,
    /// Blocks that a multiprocessor runs at once.
    blocks: u32,
    /// From IR to PTX, and from PTX to the cubin.
    compiled: Duration,
    assembled: Duration,
}

impl fmt::Display for Occupancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Occupancy { registers, threads, spills, shared, blocks, compiled, assembled } = self;
        write!(
            f,
            "{registers} registers of {threads} threads, {spills} bytes spilled, {shared} bytes shared, {blocks} blocks a multiprocessor; \
             to PTX in {compiled:.1?}, ptxas {assembled:.0?}"
        )
    }
}

impl Occupancy {
    /// That of a kernel; nothing of one that the target does not take.
    pub(super) fn of(gpu: &Gpu, kernel: Kernel) -> anyhow::Result<Option<Occupancy>> {
        let target = gpu.target()?;
        let Target::Ptx(options) = &target else { return skip(format!("no PTX for {target}")) };
        let name = kernel.name().to_owned();
        let module = validate(Module::from(kernel), Trust::Guest)?;
        if !vm_jit::legal::rejects(&module, &target).is_empty() {
            return Ok(None);
        }
        let begin = Instant::now();
        let artifact = vm_jit::compile(&module, &target)?;
        let compiled = begin.elapsed();
        let entry = artifact.entries.first().context("no entry")?;
        let folder = tempfile::tempdir()?;
        let (source, cubin) = (folder.path().join("k.ptx"), folder.path().join("k.cubin"));
        std::fs::write(&source, &artifact.code)?;
        let (begin, arch) = (Instant::now(), options.arch.to_string());
        let output =
            Command::new("ptxas").args(["-v", "-arch", &arch, "-o"]).arg(&cubin).arg(&source).output();
        let output = match output {
            Ok(output) => output,
            Err(error) => return skip(format!("ptxas: {error}")),
        };
        let assembled = begin.elapsed();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{name}: {said}");
        let before = |what: &str| -> Option<u32> {
            said.split(what).next()?.trim_end().rsplit(' ').next()?.parse().ok()
        };
        let registers = before("registers").context("ptxas says no registers")?;
        let spills = before("bytes spill stores").context("ptxas says no spills")?;
        let (threads, shared) = (entry.block.iter().product::<u32>(), entry.dynamic_shared);
        let [all, of_unit, beside] = OF_UNIT;
        let by_registers = all / (registers.next_multiple_of(8) * threads).max(1);
        let blocks = by_registers.min(of_unit / (shared + beside));
        Ok(Some(Occupancy { registers, threads, spills, shared, blocks, compiled, assembled }))
    }
}
