//! A program's view of a device: memory with addresses, and launches of its kernels on the interpreter.
#![allow(dead_code)]

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use vm_ir::Scalar;
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ptx::print::{HEAD, Record, records};
use vm_ptx::{Module, Options, Translated};
use vm_runtime::{CpuAccelerator, CudaAccelerator, JitCompiler, JitTarget, Worker, WorkerOptions};

/// What kernels run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Machine {
    Interpreter,
    /// This processor, with what vm-jit compiled.
    Cpu,
    /// The first NVIDIA GPU, if there is one.
    Cuda,
}

impl Machine {
    /// Those that there are.
    pub(crate) fn all() -> Vec<Machine> {
        let cuda = cuda().is_some().then_some(Machine::Cuda);
        [Machine::Interpreter, Machine::Cpu].into_iter().chain(cuda).collect()
    }
}

fn cpu() -> &'static Worker<CpuAccelerator> {
    static WORKER: OnceLock<Worker<CpuAccelerator>> = OnceLock::new();
    WORKER.get_or_init(|| start(CpuAccelerator::new().unwrap()))
}

fn cuda() -> Option<&'static Worker<CudaAccelerator>> {
    static WORKER: OnceLock<Option<Worker<CudaAccelerator>>> = OnceLock::new();
    let open = || CudaAccelerator::new(0).map_err(|error| println!("skipped: {error}")).ok().map(start);
    WORKER.get_or_init(open).as_ref()
}

fn start<A: JitTarget>(accelerator: A) -> Worker<A> {
    Worker::start(Arc::new(accelerator), WorkerOptions::default()).unwrap()
}

/// Runs a check of each of these files on each machine.
pub(crate) fn each(files: &[&str], check: impl Fn(Program)) {
    for file in files {
        for machine in Machine::all() {
            println!("{file} on {machine:?}");
            check(Program::on(&text(file), machine));
        }
    }
}

/// The address that programs have of the first byte.
pub(crate) const BASE: u64 = 0x7f12_3400_0000;

/// Bytes of what a launch may print.
const RING: usize = 4096;

/// A module with its memory.
pub(crate) struct Program {
    pub(crate) module: Module,
    memory: Vec<u8>,
    data: u64,
    machine: Machine,
    pub(crate) limits: Limits,
    /// What the last launch printed, of at most 4 KiB.
    pub(crate) printed: Vec<Record>,
}

/// A parameter of a launch, as bytes.
#[derive(Clone, Debug)]
pub(crate) struct Arg(Vec<u8>);

macro_rules! args {
    ($($ty:ty)*) => {$(
        impl From<$ty> for Arg {
            fn from(value: $ty) -> Arg {
                Arg(value.to_le_bytes().to_vec())
            }
        }
    )*};
}

args! { u8 i32 u32 i64 u64 f32 f64 }

impl From<Vec<u8>> for Arg {
    fn from(bytes: Vec<u8>) -> Arg {
        Arg(bytes)
    }
}

/// Numbers that memory holds.
pub(crate) trait Number: Copy {
    const SIZE: usize;
    fn put(self) -> Vec<u8>;
    fn take(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($ty:ty)*) => {$(
        impl Number for $ty {
            const SIZE: usize = size_of::<$ty>();
            fn put(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn take(bytes: &[u8]) -> Self {
                <$ty>::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}

numbers! { u8 i16 u16 i32 u32 i64 u64 f32 f64 }

pub(crate) fn text(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(format!("{name}.ptx"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Program {
    pub(crate) fn load(name: &str) -> Program {
        Program::of(&text(name))
    }

    pub(crate) fn on(text: &str, machine: Machine) -> Program {
        Program { machine, ..Program::of(text) }
    }

    pub(crate) fn of(text: &str) -> Program {
        let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let mut program = Program {
            memory: vec![0; 256],
            data: 0,
            machine: Machine::Interpreter,
            limits: Limits::default(),
            printed: Vec::new(),
            module,
        };
        let data = program.module.data().clone();
        program.data = program.take(data.size as usize, data.align as usize);
        for (offset, bytes) in data.at(BASE + program.data) {
            let at = (program.data + offset) as usize;
            program.memory[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        program
    }

    fn take(&mut self, size: usize, align: usize) -> u64 {
        let at = self.memory.len().next_multiple_of(align);
        self.memory.resize(at + size, 0);
        at as u64
    }

    /// Memory with these numbers: its address.
    pub(crate) fn put<T: Number>(&mut self, numbers: &[T]) -> u64 {
        let at = self.take(numbers.len() * T::SIZE, 256);
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.put()).collect();
        self.memory[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        BASE + at
    }

    pub(crate) fn get<T: Number>(&self, address: u64, count: usize) -> Vec<T> {
        let at = (address - BASE) as usize;
        self.memory[at..at + count * T::SIZE].chunks(T::SIZE).map(T::take).collect()
    }

    /// The address of a variable.
    pub(crate) fn symbol(&self, name: &str) -> u64 {
        let variable = self.module.data().variables.iter().find(|v| v.name == name).unwrap();
        BASE + self.data + variable.offset
    }

    pub(crate) fn translate(
        &self,
        kernel: &str,
        block: [u32; 3],
        dynamic_shared: u32,
    ) -> Result<Translated, vm_ptx::Error> {
        self.module.translate(kernel, &Options { block, dynamic_shared, data: self.data })
    }

    pub(crate) fn launch(&mut self, kernel: &str, grid: [u32; 3], block: [u32; 3], args: &[Arg]) {
        self.launch_shared(kernel, grid, block, 0, args);
    }

    pub(crate) fn launch_shared(
        &mut self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &[Arg],
    ) {
        let done = self.attempt(kernel, grid, block, shared, args);
        done.unwrap_or_else(|error| panic!("{kernel}: {error}"));
    }

    /// The same; how the launch ended.
    pub(crate) fn attempt(
        &mut self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &[Arg],
    ) -> Result<(), String> {
        let translated =
            self.translate(kernel, block, shared).unwrap_or_else(|error| panic!("{kernel}: {error}"));
        let signature = &translated.signature;
        assert_eq!(signature.parameters.len(), args.len(), "{kernel}");
        let mut parameters = vec![0; signature.size as usize];
        for (parameter, Arg(bytes)) in signature.parameters.iter().zip(args) {
            assert_eq!(parameter.size as usize, bytes.len(), "{kernel}");
            parameters[parameter.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let mut scalars = signature.arguments(&parameters);
        let length = self.memory.len();
        let block = match translated.parameters_in_memory {
            true => self.put(&parameters) - BASE,
            false => 0xdead_beef,
        };
        scalars.insert(0, block);
        let ring = translated.prints.then(|| self.put(&vec![0u8; HEAD as usize + RING]));
        scalars.extend(ring.into_iter().flat_map(|ring| [ring - BASE, RING as u64 - 1]));
        // A trap writes to memory, so that its endless loop ends the launch.
        let trap = translated.traps.then(|| self.put(&[0u64]) - BASE);
        scalars.extend(trap);
        let done = match self.machine {
            Machine::Interpreter => self.interpret(&translated, grid, &scalars),
            Machine::Cpu => self.compute(cpu(), &translated, grid, &scalars),
            Machine::Cuda => self.compute(cuda().unwrap(), &translated, grid, &scalars),
        };
        if let Some(ring) = ring {
            let count = self.get::<u64>(ring, 1)[0];
            self.printed = records(count, &self.get::<u8>(ring + HEAD, RING)).collect();
        }
        self.memory.truncate(length);
        done
    }

    fn interpret(&mut self, kernel: &Translated, grid: [u32; 3], scalars: &[u64]) -> Result<(), String> {
        let bytes = std::mem::take(&mut self.memory);
        let extents = vec![bytes.len() as u64];
        let mut arguments =
            vec![Argument::Tensor(Tensor { element: Scalar::I8, extents, bytes }), Argument::Bits(BASE)];
        arguments.extend(scalars.iter().map(|bits| Argument::Bits(*bits)));
        let name = kernel.module.kernels()[0].name().to_owned();
        let mut launch = Launch { kernel: name, grid, arguments };
        let result = run(&kernel.module, &mut launch, &self.limits);
        if let Argument::Tensor(tensor) = launch.arguments.swap_remove(0) {
            self.memory = tensor.bytes;
        }
        result.map(|_| ()).map_err(|error| error.to_string())
    }

    fn compute<A: JitTarget>(
        &mut self,
        worker: &Worker<A>,
        kernel: &Translated,
        grid: [u32; 3],
        scalars: &[u64],
    ) -> Result<(), String> {
        use vm_runtime::{Argument, Scalar};
        let compiler = JitCompiler::new(Arc::clone(worker.accelerator()));
        let compiled = compiler.compile_module(&kernel.module).map_err(|error| error.to_string())?;
        let run = |memory: &mut Vec<u8>| {
            let loaded = worker.load(compiled[0].artifact())?;
            let buffer = worker.allocate(memory.len() as u64)?;
            worker.write(&buffer, memory)?;
            let mut arguments = vec![Argument::from(&buffer), Argument::from(Scalar::from_bits(BASE, 8))];
            let sizes =
                std::iter::once(8).chain(kernel.signature.scalars.iter().map(|word| word.scalar.bytes()));
            let sizes = sizes.chain([8; 3]);
            let scalars = scalars.iter().zip(sizes);
            arguments.extend(scalars.map(|(bits, size)| Argument::from(Scalar::from_bits(*bits, size))));
            let limits = vm_runtime::Limits { fuel: self.limits.fuel, ..Default::default() };
            worker.launch(&loaded, vm_runtime::Launch::over(grid).within(limits), &arguments)?;
            worker.synchronize(Duration::from_secs(60))?;
            worker.read(&buffer, memory)
        };
        run(&mut self.memory).map_err(|error| error.to_string())
    }
}

/// Numbers that look random and are the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn f32s(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.between(-8.0, 8.0) as f32).collect()
    }

    pub(crate) fn i32s(&mut self, count: usize, least: i32, most: i32) -> Vec<i32> {
        (0..count).map(|_| least + self.below((most - least) as u64 + 1) as i32).collect()
    }
}

#[track_caller]
pub(crate) fn close(found: &[f32], expect: &[f32], relative: f32) {
    assert_eq!(found.len(), expect.len());
    for (at, (found, expect)) in found.iter().zip(expect).enumerate() {
        let near = (found - expect).abs() <= relative * expect.abs().max(1e-3)
            || found == expect
            || found.is_nan() && expect.is_nan();
        assert!(near, "number {at} is {found}, not {expect}");
    }
}
