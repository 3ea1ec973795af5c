//! Changed modules that are still valid run as machine code between canaries: whatever a guest sends, its code touches
//! its own views only, and stops.
//!
//! What is changed: every kernel of vm-ir's files and random kernels, in the binary form and in text. The same inputs in
//! every run, so that a failure repeats; the text of the kernel that runs stands in a file, in case it ends the process.
//!
//! `VM_CPU_MUTATIONS=1000000 cargo test --release -p vm-cpu --test mutated -- --nocapture` tries as many as wanted.

mod common;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use common::Machine;
use vm_accel::Artifact;
use vm_ir::arbitrary::{self, Options};
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::module::{Kernel, Module, ParamKind};
use vm_ir::mutate::Mutator;
use vm_ir::view::{Dim, ViewType};
use vm_ir::{Trust, text, validate};

/// How many changed modules there are, unless another number is asked for.
const MUTATIONS: usize = 10_000;
/// Random kernels among the seeds.
const RANDOM: u64 = 24;
/// Fuel of each thread: kernels that were changed often loop for ever.
const FUEL: u64 = 200;
/// When a kernel is stopped that is slow all the same.
const TIME: Duration = Duration::from_secs(2);
/// The most bytes of a tensor.
const BYTES: u64 = 1 << 20;
/// Launches of each kernel, with other arguments.
const LAUNCHES: usize = 2;

/// What is changed, in both forms.
#[derive(Default)]
struct Seeds {
    binaries: Vec<Vec<u8>>,
    texts: Vec<Vec<u8>>,
    /// Those in it that are valid as they are.
    whole: HashSet<Vec<u8>>,
}

impl Seeds {
    /// Takes each kernel by itself, so that what is changed is what runs.
    fn take(&mut self, module: &Module) {
        for kernel in module.kernels() {
            let one = Module::new(vec![kernel.clone()]);
            let binary = encode(&one, Lines::Strip);
            self.whole.insert(binary.clone());
            self.binaries.push(binary);
            if let Ok(valid) = validate(one, Trust::Guest) {
                self.texts.push(text::print(&valid).into_bytes());
            }
        }
    }

    fn new() -> Seeds {
        let mut seeds = Seeds::default();
        for folder in ["run", "tile", "validate"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vm-ir/filetests").join(folder);
            let mut paths: Vec<_> =
                std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            for path in paths {
                let source = std::fs::read_to_string(path).unwrap();
                match text::parse(&source) {
                    Ok(module) => seeds.take(&module),
                    // One change may make a module of it.
                    Err(_) => seeds.texts.push(source.into_bytes()),
                }
            }
        }
        for seed in 0..RANDOM {
            let (vectors, together) = (seed % 2 == 0, seed % 3 != 0);
            let options = Options { statements: 12, vectors, together, ..Options::default() };
            seeds.take(&arbitrary::kernel(seed, options).0);
        }
        (0..RANDOM).for_each(|seed| seeds.take(&arbitrary::tile_kernel(seed).0));
        seeds
    }

    /// One of them, changed, as a module if it is one, and another than before.
    fn changed(&self, mutator: &mut Mutator) -> Option<Module> {
        let module = self.change(mutator)?;
        (!self.whole.contains(&encode(&module, Lines::Strip))).then_some(module)
    }

    fn change(&self, mutator: &mut Mutator) -> Option<Module> {
        if mutator.below(2) == 0 {
            let mut bytes = self.binaries[mutator.below(self.binaries.len())].clone();
            let other = &self.binaries[mutator.below(self.binaries.len())];
            mutator.binary(&mut bytes, other);
            decode(&bytes).ok()
        } else {
            let mut bytes = self.texts[mutator.below(self.texts.len())].clone();
            let other = &self.texts[mutator.below(self.texts.len())];
            mutator.text(&mut bytes, other);
            text::parse(std::str::from_utf8(&bytes).ok()?).ok()
        }
    }
}

/// A tensor for a view, if one of few bytes fits it. `named` are the extents that have names, by those.
fn tensor<'k>(
    view: &'k ViewType,
    named: &mut HashMap<&'k str, u64>,
    mutator: &mut Mutator,
) -> Option<Tensor> {
    let bytes = u64::from(view.element.bytes());
    let last = view.dims.len().saturating_sub(1);
    let extents: Vec<u64> = view
        .dims
        .iter()
        .enumerate()
        .map(|(place, dim)| match *dim {
            Dim::Fixed(extent) => extent,
            Dim::Any { multiple } => {
                // Rows begin where the view says.
                let rows = place == last && last > 0;
                let step = u64::from(multiple) * if rows { u64::from(view.align).div_ceil(bytes) } else { 1 };
                let wanted = [0u64, 1, 2, 5, 8, 33, 64, 100][mutator.below(8)];
                let extent = wanted.next_multiple_of(step);
                let name = view.names.get(place).and_then(Option::as_deref);
                name.map_or(extent, |name| *named.entry(name).or_insert(extent))
            }
        })
        .collect();
    extents.iter().try_fold(bytes, |sum, extent| sum.checked_mul(*extent)).filter(|sum| *sum <= BYTES)?;
    let mut tensor = Tensor::zeros(view.element, &extents);
    match mutator.below(3) {
        0 => {}
        // Small numbers, which are good indices.
        1 => (0..tensor.len()).for_each(|at| tensor.set_bits(at, mutator.below(9) as u64)),
        _ => tensor.bytes.iter_mut().for_each(|byte| *byte = mutator.number() as u8),
    }
    Some(tensor)
}

/// A launch of a kernel, if one of little memory fits it.
fn launch(kernel: &Kernel, mutator: &mut Mutator) -> Option<Launch> {
    let (mut arguments, mut named) = (Vec::new(), HashMap::new());
    for param in kernel.params() {
        arguments.push(match &param.kind {
            ParamKind::View(view) => Argument::Tensor(tensor(view, &mut named, mutator)?),
            ParamKind::Scalar { value, range } => {
                let scalar = kernel.type_of(*value).scalar();
                let number = match mutator.below(4) {
                    0 => mutator.number(),
                    1 => u64::MAX - mutator.below(3) as u64,
                    _ => mutator.below(100) as u64,
                };
                let within = |(least, greatest): (i64, i64)| (number as i64).clamp(least, greatest) as u64;
                Argument::Bits(range.map_or(number, within) & scalar.mask())
            }
        });
    }
    let grid = [kernel.cluster().checked_mul(1 + mutator.below(2) as u32)?, 1 + mutator.below(2) as u32, 1];
    let launch = Launch { kernel: kernel.name().to_owned(), grid, arguments };
    launch.check(kernel).is_ok().then_some(launch)
}

/// What became of the inputs.
#[derive(Debug, Default)]
struct Counts {
    inputs: usize,
    /// Those that are a module, and another than before.
    modules: usize,
    valid: usize,
    /// Kernels that were compiled.
    compiled: usize,
    /// Kernels that the compiler declared itself unable to compile.
    rejected: usize,
    /// Launches.
    ran: usize,
    /// Those that were stopped.
    stopped: usize,
}

#[test]
fn what_runs_touches_its_own_views_only() {
    let machines = Machine::all();
    let seeds = Seeds::new();
    let asked = std::env::var("VM_CPU_MUTATIONS").ok().map(|number| number.parse().unwrap());
    let running = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutated.vir");
    let mut mutator = Mutator::new(0x9e37_79b9_7f4a_7c15);
    let mut counts = Counts::default();
    while counts.inputs < asked.unwrap_or(MUTATIONS) {
        counts.inputs += 1;
        if counts.inputs.is_multiple_of(50_000) {
            println!("{counts:?}");
        }
        let Some(module) = seeds.changed(&mut mutator) else { continue };
        counts.modules += 1;
        let Ok(valid) = validate(module, Trust::Guest) else { continue };
        let machine = &machines[counts.valid % machines.len()];
        counts.valid += 1;
        let printed = text::print(&valid);
        std::fs::write(&running, &printed).unwrap();
        for kernel in valid.kernels() {
            let artifact: Artifact = match machine.compile(&valid, kernel.name()) {
                Ok(artifact) => artifact,
                Err(error) if error.starts_with("rejected: ") => {
                    counts.rejected += 1;
                    continue;
                }
                Err(error) => panic!("input {}: {error}\n{printed}", counts.inputs),
            };
            counts.compiled += 1;
            for _ in 0..LAUNCHES {
                let Some(mut launch) = launch(kernel, &mut mutator) else { continue };
                match machine.launch(&artifact, &mut launch, FUEL, TIME) {
                    Ok(stop) => {
                        counts.ran += 1;
                        counts.stopped += usize::from(stop != 0);
                    }
                    Err(error) => panic!("input {}: {error}\n{launch:?}\n{printed}", counts.inputs),
                }
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.ran * 20 > counts.inputs && counts.stopped > 0, "too few of them ran: {counts:?}");
}
