//! Compiles kernels for this machine and runs them as a queue does, with canaries around every tensor.
#![allow(unsafe_code, dead_code)]

pub(crate) mod large;

use std::ops::Range;
use std::time::{Duration, Instant};
use vm_accel::{
    Accelerator, Arguments, Artifact, Extent, Extents, Grid, Guard, MemoryKind, Parameter, ParameterKind,
    Queue, QueueArgument, QueueOptions, Scalar, Signature,
};
use vm_cpu::{CpuAccelerator, CpuQueue};
use vm_ir::ValidModule;
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::module::ParamKind;
use vm_ir::view::Dim;
use vm_jit::backend::cpu::Isa;
use vm_jit::{Target, compile};

/// Bytes before and behind each tensor.
const MARGIN: u64 = 4096;
const CANARY: u8 = 0xc5;
/// How long anything may take that must come to an end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a kernel's launch left in the cancel flag; 0 if it ended by itself.
pub(crate) type Stop = u32;

pub(crate) struct Machine {
    pub(crate) device: CpuAccelerator,
    pub(crate) queue: CpuQueue,
    target: Target,
}

/// Where a tensor lies.
struct Place {
    /// Bytes from the first element to the last, with what is between rows.
    bytes: usize,
    /// Bytes of a row, which is all that lies along the last dimension.
    row: usize,
    /// Where each begins.
    starts: Vec<usize>,
    /// Bytes from one of each dimension but the last to the next, if rows don't lie one behind the other.
    strides: Option<Vec<u64>>,
}

impl Place {
    /// Of a tensor with these strides in elements.
    fn of(tensor: &Tensor, strides: Option<&[u64]>) -> Place {
        let width = tensor.element.bytes() as usize;
        let Some((last, counted)) = tensor.extents.split_last() else {
            unreachable!("a view of no dimensions")
        };
        let (row, rows) = (*last as usize * width, counted.iter().product::<u64>());
        let Some(strides) = strides else {
            let starts = (0..rows as usize).map(|number| number * row).collect();
            return Place { bytes: tensor.bytes.len(), row, starts, strides: None };
        };
        let strides: Vec<_> = strides[..counted.len()].iter().map(|stride| stride * width as u64).collect();
        let start = |mut number: u64| {
            counted.iter().zip(&strides).rev().fold(0, |start, (extent, stride)| {
                let index = number % extent;
                number /= extent;
                start + (index * stride) as usize
            })
        };
        let starts: Vec<_> = (0..if row == 0 { 0 } else { rows }).map(start).collect();
        let bytes = starts.iter().max().map_or(0, |start| start + row);
        Place { bytes, row, starts, strides: Some(strides) }
    }

    /// The bytes of each row.
    fn rows(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.starts.iter().map(|start| *start..start + self.row)
    }
}

/// The artifact of a kernel of a compiled module.
pub(crate) fn artifact(module: &ValidModule, kernel: &str, target: &Target) -> Result<Artifact, String> {
    let compiled = compile(module, target).map_err(|rejected| format!("rejected: {rejected}"))?;
    let entry = compiled.entry(kernel).ok_or("no such kernel")?;
    let (source, _) = module.find(kernel).ok_or("no such kernel")?;
    let parameters = (0..).zip(source.params()).map(|(index, param)| {
        let kind = match &param.kind {
            ParamKind::View(view) => ParameterKind::View {
                extents: view
                    .dims
                    .iter()
                    .enumerate()
                    .map(|(at, dim)| match (*dim, source.same_extent(index, at)) {
                        (_, (first, dimension)) if (first, dimension) != (index, at) => {
                            Extent::Same { parameter: first.into(), dimension: dimension as u32 }
                        }
                        (Dim::Any { multiple }, _) => Extent::Multiple(multiple),
                        (Dim::Fixed(extent), _) => Extent::Fixed(extent),
                    })
                    .collect(),
                element: vm_jit::artifact::element(view.element),
                align: view.align,
                writes: view.access.writes(),
            },
            ParamKind::Scalar { value, range } => {
                ParameterKind::Scalar { bytes: source.type_of(*value).scalar().bytes(), range: *range }
            }
        };
        Parameter { name: param.name.to_string(), kind }
    });
    let signature = Signature {
        entry: entry.symbol.clone(),
        block: entry.block,
        cluster: entry.cluster,
        shared_bytes: entry.dynamic_shared,
        parameters: parameters.collect(),
        tiles: vec![],
        guarded: entry.params.guard.is_some(),
        cost_bound: entry.work,
    };
    // SAFETY: the compiler made it from a valid module; what is trusted here is a test's own.
    unsafe { Artifact::new(compiled.code, signature) }.map_err(|error| error.to_string())
}

impl Machine {
    /// This machine.
    pub(crate) fn new() -> Machine {
        Machine::of(Isa::host().unwrap())
    }

    /// This machine, as if it were an older one.
    fn of(isa: Isa) -> Machine {
        let device = CpuAccelerator::new().unwrap();
        let queue = device.open(&QueueOptions::default()).unwrap();
        Machine { device, queue, target: format!("cpu:{isa}").parse().unwrap() }
    }

    /// This machine, and as the older ones whose code it runs too.
    pub(crate) fn all() -> Vec<Machine> {
        let host = Isa::host().unwrap();
        let older = Isa::ALL.into_iter().take_while(|isa| *isa != host);
        let older = older.filter(|isa| isa.architecture() == host.architecture());
        std::iter::once(host).chain(older).map(Machine::of).collect()
    }

    /// What it is.
    pub(crate) fn name(&self) -> String {
        self.target.to_string()
    }

    /// Compiles a kernel.
    pub(crate) fn compile(&self, module: &ValidModule, kernel: &str) -> Result<Artifact, String> {
        artifact(module, kernel, &self.target)
    }

    /// Runs a launch; its tensors hold what came out.
    pub(crate) fn run(&self, module: &ValidModule, launch: &mut Launch, fuel: u64) -> Result<Stop, String> {
        self.launch(&self.compile(module, &launch.kernel)?, launch, fuel, TIMEOUT)
    }

    /// The same of tensors with strided rows, with canaries in between: by argument the elements from one of each dimension to the next.
    pub(crate) fn run_strided(
        &self,
        module: &ValidModule,
        launch: &mut Launch,
        strides: &[Vec<u64>],
        fuel: u64,
    ) -> Result<Stop, String> {
        self.launch_strided(&self.compile(module, &launch.kernel)?, launch, strides, fuel, TIMEOUT)
    }

    /// Runs a launch of a compiled kernel, which is stopped when the time is up; its tensors hold what came out.
    ///
    /// # Errors
    /// What it did that no kernel may: it touched a canary or what it may only read, or did not stop.
    pub(crate) fn launch(
        &self,
        artifact: &Artifact,
        launch: &mut Launch,
        fuel: u64,
        time: Duration,
    ) -> Result<Stop, String> {
        self.launch_strided(artifact, launch, &[], fuel, time)
    }

    fn launch_strided(
        &self,
        artifact: &Artifact,
        launch: &mut Launch,
        strides: &[Vec<u64>],
        fuel: u64,
        time: Duration,
    ) -> Result<Stop, String> {
        let queue = &self.queue;
        let places: Vec<_> = (0..)
            .zip(&launch.arguments)
            .map(|(number, argument): (usize, _)| {
                argument.tensor().map(|tensor| Place::of(tensor, strides.get(number).map(Vec::as_slice)))
            })
            .collect();
        let kernel = queue.load(artifact).map_err(|error| error.to_string())?;
        let mut memories = Vec::new();
        for place in &places {
            let memory = place.as_ref().map(|place| {
                let bytes = place.bytes as u64;
                let memory =
                    queue.allocate(MemoryKind::Pinned, bytes.next_multiple_of(256) + 2 * MARGIN).unwrap();
                queue.fill(memory.region(), CANARY).unwrap();
                memory
            });
            memories.push(memory);
        }
        let stop = queue.allocate(MemoryKind::Pinned, 4).unwrap();
        queue.fill(stop.region(), 0).unwrap();
        let event = queue.event(false).unwrap();
        let wait = |time| queue.wait(&event, Instant::now() + time).map_err(|error| error.to_string());
        queue.record(&event).unwrap();
        wait(TIMEOUT)?;
        let mut arguments = Vec::new();
        let parameters = &artifact.signature().parameters;
        let given = launch.arguments.iter().zip(&places).zip(&memories);
        for (((argument, place), memory), parameter) in given.zip(parameters) {
            arguments.push(match (argument, place.as_ref().zip(memory.as_ref()), &parameter.kind) {
                (Argument::Tensor(tensor), Some((place, memory)), _) => {
                    let region = memory.region().slice(MARGIN, place.bytes as u64).unwrap();
                    let mut image = vec![CANARY; place.bytes];
                    for (row, bytes) in place.rows().zip(tensor.bytes.chunks(place.row.max(1))) {
                        image[row].copy_from_slice(bytes);
                    }
                    region.write_host(&image).unwrap();
                    let extents = match &place.strides {
                        None => Extents::packed(&tensor.extents),
                        Some(strides) => Extents::strided(&tensor.extents, strides),
                    };
                    QueueArgument::View(region, extents.map_err(|error| error.to_string())?)
                }
                (Argument::Bits(bits), _, ParameterKind::Scalar { bytes, .. }) => {
                    QueueArgument::Scalar(Scalar::from_bits(*bits, *bytes))
                }
                _ => unreachable!("an argument of another kind"),
            });
        }
        let mut packed = Arguments::new(artifact, arguments).map_err(|error| error.to_string())?;
        packed.guard(artifact, stop.region(), fuel).unwrap();
        // SAFETY: the memory is freed below, by the same queue.
        unsafe { queue.launch(&kernel, Grid(launch.grid), &packed) }.map_err(|error| error.to_string())?;
        queue.record(&event).unwrap();
        if wait(time).is_err() {
            stop.region().write_host(&Guard::STOP.to_le_bytes()).unwrap();
            wait(TIMEOUT)?;
        }
        let mut word = [0; 4];
        stop.region().read_host(&mut word).unwrap();
        let done = launch.arguments.iter_mut().zip(&places).zip(memories).enumerate();
        for (number, ((argument, place), memory)) in done {
            if let (Argument::Tensor(tensor), Some(place), Some(memory)) = (argument, place, memory) {
                let mut all = vec![0; memory.bytes() as usize];
                memory.region().read_host(&mut all).unwrap();
                let read_only = matches!(parameters[number].kind, ParameterKind::View { writes: false, .. });
                for (row, bytes) in place.rows().zip(tensor.bytes.chunks_mut(place.row.max(1))) {
                    let found = &mut all[MARGIN as usize..][row];
                    if read_only && bytes != found {
                        return Err(format!("argument {number}, which is only read, was written"));
                    }
                    bytes.copy_from_slice(found);
                    // What is left are the canaries.
                    found.fill(CANARY);
                }
                if let Some(at) = all.iter().position(|byte| *byte != CANARY) {
                    return Err(format!(
                        "argument {number}: canary {at}, from {MARGIN} before it, was touched"
                    ));
                }
                queue.free(memory).unwrap();
            }
        }
        queue.free(stop).unwrap();
        queue.unload(kernel).unwrap();
        Ok(u32::from_le_bytes(word))
    }
}
