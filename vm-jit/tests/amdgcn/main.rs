//! LLVM IR for AMD GPUs: LLVM takes every op on every type and every kernel under vm-ir/filetests/run and tile, for each chip; and what
//! it makes of them computes on an emulator what the files say.
//!
//! `AMDGCN_FILE` has only files run whose names contain it, `AMDGCN_CHIP` only that chip.

mod emulator;

mod large;
mod library;
mod random;
#[path = "../ptxas/sweep.rs"]
mod sweep;

use emulator::Emulator;
use std::num::FpCategory;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vm_ir::filetest::{Ending, Random, cases, is_on_values, op_kernel, op_launch, op_tolerance};
use vm_ir::interp::{self, Argument, Launch, run};
use vm_ir::limits::MAX_KERNELS;
use vm_ir::{Module, Trust, filetest, op, text, validate};
use vm_jit::backend::amdgcn::Chip;
use vm_jit::{Artifact, Guard, Target, compile, legal};
use vm_rocm::assemble::{Assembler, Limits};

/// Fuel of each thread: more than any of the files needs, and few enough for those that never end.
const FUEL: u64 = 10_000;
/// Chips that are emulated, of which the others are like one.
const EMULATED: [Chip; 4] = [Chip::Gfx942, Chip::Gfx950, Chip::Gfx1100, Chip::Gfx1201];

fn target(chip: Chip) -> Target {
    format!("amdgcn:{chip}").parse().unwrap()
}

fn wanted(name: &str, value: &str) -> bool {
    std::env::var(name).map_or(true, |only| value.contains(&only))
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests");
    let of = |name| folder.join(name).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = ["run", "tile"].into_iter().flat_map(of).collect();
    paths.retain(|path| wanted("AMDGCN_FILE", &path.to_string_lossy()));
    paths.sort();
    paths
}

/// The chips that a sweep takes: with a seed one of them.
fn chips(all: &[Chip]) -> Vec<Chip> {
    let taken = sweep::taken("chips", all.iter().copied());
    taken.into_iter().filter(|chip| wanted("AMDGCN_CHIP", chip.name())).collect()
}

/// LLVM, with more time than it takes on a machine that does much else; `None` where it is missing.
fn assembler() -> Option<Assembler> {
    let limits = Limits { time: Duration::from_secs(300), ..Limits::default() };
    let found = Assembler::find().map(|assembler| assembler.limits(limits));
    found.map_err(|reason| println!("skipped: {reason}")).ok()
}

/// LLVM, and what makes code objects of it that an emulator runs; nothing where one is missing.
struct Emulation {
    assembler: Assembler,
    emulator: Emulator,
    folder: tempfile::TempDir,
}

impl Emulation {
    fn start() -> Option<Emulation> {
        let assembler = assembler()?;
        let emulator = Emulator::start().map_err(|reason| println!("skipped: {reason}")).ok()?;
        Some(Emulation { assembler, emulator, folder: tempfile::tempdir().unwrap() })
    }

    /// Writes the code object of what was compiled for a chip.
    fn object(&self, artifact: &Artifact, chip: Chip) -> Result<PathBuf, String> {
        let code = self.assembler.assemble(&artifact.code, chip.name()).map_err(|error| error.to_string())?;
        let object = self.folder.path().join("object.hsaco");
        std::fs::write(&object, code).map_err(|error| error.to_string())?;
        Ok(object)
    }

    /// Assembles and launches a kernel, as [`Emulator::run`] does.
    fn run(
        &mut self,
        artifact: &Artifact,
        chip: Chip,
        launch: &mut Launch,
        strides: &[Vec<u64>],
        fuel: u64,
    ) -> Result<u32, String> {
        let object = self.object(artifact, chip)?;
        let entry = artifact.entry(&launch.kernel).ok_or("no such kernel")?;
        let ran = self.emulator.run(chip.name(), &object, entry, launch, strides, fuel);
        // A kernel that reaches where nothing is mapped takes the emulator with it.
        if self.emulator.has_ended() {
            self.emulator = Emulator::start()?;
        }
        ran
    }
}

/// A kernel of each op on values, on each type.
struct OpKernel {
    row: &'static op::OpInfo,
    to: vm_ir::Scalar,
    lanes: usize,
    /// Without the head of a module.
    text: String,
    name: String,
}

fn op_kernels() -> Vec<OpKernel> {
    let mut all = Vec::new();
    for row in op::TABLE.iter().filter(|row| is_on_values(row)) {
        for (from, to) in legal::types_of(row.opcode) {
            for lanes in [1, 4] {
                let (name, source) = (format!("k{}", all.len()), op_kernel(row, from, to, lanes));
                let Ok(module) = text::parse(&source) else { continue };
                let old = format!("kernel @{}(", module.kernels()[0].name());
                let body = source.strip_prefix("vir 1").unwrap_or(&source);
                let text = body.replacen(&old, &format!("kernel @{name}("), 1);
                all.push(OpKernel { row, to, lanes, text, name });
            }
        }
    }
    all
}

/// Of a division of f64, takes quotients for right that are below all normal numbers, or whose divisor is subnormal: the
/// emulator rounds the ones twice and has not the others.
fn leave_out_subnormals(got: &mut [Argument], right: &[Argument]) {
    let [.., Argument::Tensor(got)] = got else { return };
    let [_, Argument::Tensor(divisors), Argument::Tensor(right)] = right else { return };
    let class = |bytes: &[u8]| bytes.try_into().map_or(FpCategory::Nan, |b| f64::from_le_bytes(b).classify());
    let elements = got.bytes.chunks_exact_mut(8).zip(right.bytes.chunks_exact(8));
    for ((got, right), divisor) in elements.zip(divisors.bytes.chunks_exact(8)) {
        let tiny = matches!(class(right), FpCategory::Subnormal | FpCategory::Zero);
        if tiny || class(divisor) == FpCategory::Subnormal {
            got.copy_from_slice(right);
        }
    }
}

fn module_of(kernels: &[OpKernel]) -> Module {
    let bodies: Vec<&str> = kernels.iter().map(|kernel| kernel.text.as_str()).collect();
    text::parse(&format!("vir 1\n{}", bodies.join("\n"))).unwrap()
}

#[test]
fn llvm_takes_all() {
    let Some(assembler) = assembler() else { return };
    for chip in chips(&Chip::ALL) {
        let check = |what: &str, module: Module, trust: Trust| {
            let valid = validate(module, trust).unwrap();
            match compile(&valid, &target(chip)) {
                Ok(artifact) => {
                    let code = assembler.assemble(&artifact.code, chip.name());
                    code.unwrap_or_else(|error| panic!("{what} for {chip}: {error}"));
                }
                Err(rejected) => {
                    let known = ["shared-memory", "cluster", "unsupported-op", "unsupported-tile"];
                    assert!(
                        rejected.0.iter().all(|one| known.contains(&one.kind.code())),
                        "{what}: {rejected}"
                    );
                }
            }
        };
        for path in files() {
            let source = std::fs::read_to_string(&path).unwrap();
            let module = text::parse(&source).unwrap();
            for trust in [Trust::Guest, Trust::Trusted] {
                if validate(module.clone(), trust).is_ok() {
                    check(&path.display().to_string(), module.clone(), trust);
                }
            }
        }
        for kernels in op_kernels().chunks(MAX_KERNELS) {
            check("every op", module_of(kernels), Trust::Guest);
        }
    }
}

#[test]
fn files_run_emulated() {
    let Some(mut emulation) = Emulation::start() else { return };
    let (mut ran, mut failures) = (0, String::new());
    for chip in chips(&EMULATED) {
        for path in files() {
            let source = std::fs::read_to_string(&path).unwrap();
            let module = text::parse(&source).unwrap();
            for case in cases(&source, &module).unwrap() {
                let Some(ending @ (Ending::Well | Ending::OutOfFuel)) = case.ending() else { continue };
                let endless = ending == Ending::OutOfFuel;
                let valid = validate(module.clone(), case.trust).unwrap();
                let Ok(artifact) = compile(&valid, &target(chip)) else { continue };
                let begin = Instant::now();
                let mut launch = case.launch.clone();
                let stop = emulation.run(&artifact, chip, &mut launch, &[], FUEL);
                let place = format!("{} line {} on {chip}", path.file_name().unwrap().display(), case.line);
                let result = match stop {
                    Ok(Guard::OUT_OF_FUEL) if endless => Ok(()),
                    Ok(0) if !endless => case.check(&launch.arguments).map_err(|failure| failure.to_string()),
                    Ok(stop) => Err(format!("stopped with {stop:#x}")),
                    Err(error) => Err(error),
                };
                println!("{place}: {:.1} s", begin.elapsed().as_secs_f64());
                if let Err(error) = result {
                    println!("{place}: {error}");
                    failures += &format!("{place}: {error}\n");
                }
                ran += 1;
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(ran > 0);
}

#[test]
fn ops_compute_emulated_what_the_interpreter_does() {
    let Some(mut emulation) = Emulation::start() else { return };
    let (kernels, mut failures) = (op_kernels(), String::new());
    for (chip, kernels) in chips(&EMULATED).into_iter().flat_map(|chip| {
        let parts = kernels.chunks(MAX_KERNELS);
        parts.map(move |kernels| (chip, kernels))
    }) {
        let valid = validate(module_of(kernels), Trust::Guest).unwrap();
        let artifact = compile(&valid, &target(chip)).unwrap();
        let object = emulation.object(&artifact, chip).unwrap();
        for kernel in kernels.iter().filter(|kernel| wanted("AMDGCN_OP", kernel.row.mnemonic)) {
            let place = format!("{} of {} × {} on {chip}", kernel.row.mnemonic, kernel.to, kernel.lanes);
            let (source, _) = valid.find(&kernel.name).unwrap();
            let mut launch = op_launch(source, kernel.lanes, &mut Random(7));
            let mut right = launch.clone();
            run(&valid, &mut right, &interp::Limits::default()).unwrap();
            let entry = artifact.entry(&kernel.name).unwrap();
            let ran = emulation.emulator.run(chip.name(), &object, entry, &mut launch, &[], FUEL);
            let compared = ran.and_then(|_| {
                let tolerance = op_tolerance(kernel.row, kernel.to);
                if (kernel.row.opcode, kernel.to) == (op::Opcode::Div, vm_ir::Scalar::F64) {
                    leave_out_subnormals(&mut launch.arguments, &right.arguments);
                }
                let pairs = launch.arguments.iter().zip(&right.arguments);
                pairs.filter_map(|(got, right)| got.tensor().zip(right.tensor())).try_for_each(
                    |(got, right)| {
                        filetest::compare(got, right, tolerance).map_err(|error| error.to_string())
                    },
                )
            });
            if let Err(error) = compared {
                println!("{place}: {error}");
                failures += &format!("{place}: {error}\n");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
