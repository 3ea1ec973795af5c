//! What compiles the kernels of steps for a device, and runs them there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use vm_ir::GuestAddr;
use vm_ir::builder::BuildError;
use vm_kernels::call::{CallError, Entry, Operand};
use vm_kernels::family::Resources;
use vm_runtime::{
    Argument, Buffer, CompileError, CompiledKernel, ElementType, Graph, Grid, JitCompiler, JitTarget, Kernel,
    Scalar, Session, WorkerOptions, resources,
};

use crate::program::{Memory, Part, Steps};

/// How long anything that is waited for may take.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Why steps did not run.
#[derive(Debug, Error)]
pub enum MachineError {
    /// A function has no launches for such extents or on such a device.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A kernel can't be written.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A kernel was not compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device's.
    #[error(transparent)]
    Device(#[from] vm_runtime::Error),
    /// A step's buffers are not what its function wants.
    #[error("{function}: {what}")]
    Step {
        /// The function.
        function: String,
        /// What does not fit.
        what: String,
    },
}

/// A device with the arrays of programs, and the kernels that were loaded there.
pub struct Machine<A: JitTarget> {
    session: Session<A>,
    compiler: JitCompiler<A>,
    resources: Resources,
    kernels: HashMap<Entry, Kernel<A>>,
    memory: Memory,
    buffers: Vec<Buffer<A>>,
}

/// Steps that are ready to run: their launches, in order.
pub struct Ready<A: JitTarget> {
    launches: Vec<Launch<A>>,
    /// What launches of one function hand to each other.
    workspace: Option<Buffer<A>>,
}

/// A launch.
struct Launch<A: JitTarget> {
    kernel: Kernel<A>,
    grid: Grid,
    operands: Vec<Place>,
}

/// An argument of a launch.
enum Place {
    /// A view of an array, or, without a number, of the workspace: from a byte on, its extents in elements, and the bytes between the
    /// elements of each dimension but the last.
    View(Option<usize>, u64, Vec<u64>, Vec<u64>),
    Number(Scalar),
}

impl<A: JitTarget> Ready<A> {
    /// How many launches there are.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }
}

impl<A: JitTarget> Machine<A> {
    /// Takes a compiler's device, and allocates the arrays there.
    ///
    /// # Errors
    /// The device's.
    pub fn new(compiler: JitCompiler<A>, memory: &Memory) -> Result<Machine<A>, MachineError> {
        let accelerator = Arc::clone(compiler.accelerator());
        let resources = resources(accelerator.info());
        let session = Session::open(accelerator, WorkerOptions::default())?;
        let buffers = memory.arrays.iter().map(|array| {
            let bytes = array.len * u64::from(array.element.bytes());
            session.allocate_zeroed(bytes.max(1))
        });
        let buffers = buffers.collect::<Result<_, _>>()?;
        let memory = memory.clone();
        Ok(Machine { session, compiler, resources, kernels: HashMap::new(), memory, buffers })
    }

    /// Compiles and loads what steps need.
    ///
    /// # Errors
    /// What a function, the compiler or the device says, and a step whose parts are not its function's buffers.
    pub fn prepare(&mut self, steps: &Steps) -> Result<Ready<A>, MachineError> {
        let mut calls = Vec::new();
        for step in &steps.0 {
            let function = || format!("{:?}", step.function);
            self.memory.check(step).map_err(|what| MachineError::Step { function: function(), what })?;
            calls.push(step.function.call(&self.resources)?);
        }
        self.load(calls.iter().flat_map(|call| call.launches.iter().map(|launch| launch.entry)))?;
        let workspace = calls.iter().map(|call| call.workspace).max().filter(|bytes| *bytes > 0);
        let workspace = workspace.map(|bytes| self.session.allocate(bytes)).transpose()?;
        let mut launches = Vec::new();
        for (step, call) in steps.0.iter().zip(calls) {
            for launch in call.launches {
                let operands = launch.operands.iter().map(|operand| self.place(&step.parts, operand));
                launches.push(Launch {
                    kernel: self.kernels[&launch.entry].clone(),
                    grid: Grid(launch.grid),
                    operands: operands.collect(),
                });
            }
        }
        Ok(Ready { launches, workspace })
    }

    /// Compiles the kernels that are not loaded yet, on all processors, and loads them.
    fn load(&mut self, entries: impl Iterator<Item = Entry>) -> Result<(), MachineError> {
        let mut missing: Vec<Entry> = Vec::new();
        for entry in entries {
            if !self.kernels.contains_key(&entry) && !missing.contains(&entry) {
                missing.push(entry);
            }
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let compiler = &self.compiler;
        let compile = |entry: &Entry| -> Result<CompiledKernel, MachineError> {
            Ok(compiler.compile_kernel(entry.kernel(GuestAddr(0))?)?)
        };
        let parts = missing.chunks(missing.len().div_ceil(threads).max(1));
        let compiled: Vec<Result<CompiledKernel, MachineError>> = std::thread::scope(|scope| {
            let handles: Vec<_> =
                parts.map(|part| scope.spawn(|| part.iter().map(compile).collect::<Vec<_>>())).collect();
            let join = |handle: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            handles.into_iter().flat_map(join).collect()
        });
        for (entry, compiled) in missing.into_iter().zip(compiled) {
            let kernel = self.session.load(compiled?.artifact())?;
            self.kernels.insert(entry, kernel);
        }
        Ok(())
    }

    /// An operand of a call, whose buffers are these parts.
    fn place(&self, parts: &[Part], operand: &Operand) -> Place {
        let (part, region) = match operand {
            Operand::Number(bits, ty) => {
                return Place::Number(Scalar::from_bits(*bits, ty.scalar().bytes()));
            }
            Operand::Buffer(buffer, region) => (Some(parts[*buffer]), region),
            Operand::Workspace(region) => (None, region),
        };
        let bytes = u64::from(region.element.bytes());
        let mut strides: Vec<u64> = region.strides.iter().map(|stride| stride * bytes).collect();
        strides.pop();
        let first =
            part.map_or(0, |part| part.first * u64::from(self.memory.arrays[part.array].element.bytes()));
        Place::View(part.map(|part| part.array), first + region.offset, region.extents.clone(), strides)
    }

    /// Starts steps, and does not wait for them.
    ///
    /// # Errors
    /// The device's.
    pub fn run(&self, ready: &Ready<A>) -> Result<(), MachineError> {
        Ok(self.start(&self.session, ready)?)
    }

    /// The device's time for each launch alone, with its kernel's name. What is between launches is in none.
    ///
    /// # Errors
    /// The device's.
    pub fn profile(&self, ready: &Ready<A>) -> Result<Vec<(String, Duration)>, MachineError> {
        let time = |number: usize| {
            let entry = ready.launches[number].kernel.entry().to_owned();
            let start = |session: &Session<A>| self.start_some(session, ready, number..number + 1);
            let taken = self.session.timed(Instant::now() + TIMEOUT, start)?;
            Ok((entry, taken))
        };
        (0..ready.launches.len()).map(time).collect()
    }

    fn start(&self, session: &Session<A>, ready: &Ready<A>) -> Result<(), vm_runtime::Error> {
        self.start_some(session, ready, 0..ready.launches.len())
    }

    fn start_some(
        &self,
        session: &Session<A>,
        ready: &Ready<A>,
        range: Range<usize>,
    ) -> Result<(), vm_runtime::Error> {
        for launch in &ready.launches[range] {
            let arguments = launch.operands.iter().map(|operand| {
                let (array, first, extents, strides) = match operand {
                    Place::Number(number) => return Ok(Argument::Scalar(*number)),
                    Place::View(array, first, extents, strides) => (array, *first, extents, strides),
                };
                let buffer = match array {
                    Some(array) => &self.buffers[*array],
                    None => ready.workspace.as_ref().unwrap_or(&self.buffers[0]),
                };
                let view = buffer.view(first, buffer.bytes().saturating_sub(first))?;
                Ok(Argument::View(view.strided(extents, strides)?))
            });
            let arguments = arguments.collect::<Result<Vec<_>, vm_runtime::Error>>()?;
            session.launch(&launch.kernel, launch.grid, &arguments)?;
        }
        Ok(())
    }

    /// Records steps, to be replayed by one call. They must not be dropped before the graph.
    ///
    /// # Errors
    /// The device's; not every device has graphs.
    pub fn capture(&self, ready: &Ready<A>) -> Result<Graph<A>, MachineError> {
        Ok(self.session.capture(|session| self.start(session, ready))?)
    }

    /// Starts what was recorded.
    ///
    /// # Errors
    /// The device's.
    pub fn replay(&self, graph: &Graph<A>) -> Result<(), MachineError> {
        Ok(self.session.replay(graph)?)
    }

    /// The device's time for what `f` starts.
    ///
    /// # Errors
    /// What `f` returns, and the device's.
    pub fn timed(&self, f: impl FnOnce(&Self) -> Result<(), MachineError>) -> Result<Duration, MachineError> {
        let mut done = Ok(());
        let taken = self.session.timed(Instant::now() + TIMEOUT, |_| {
            done = f(self);
            Ok(())
        });
        done.and(Ok(taken?))
    }

    /// Waits until all has run.
    ///
    /// # Errors
    /// What failed meanwhile.
    pub fn synchronize(&self) -> Result<(), MachineError> {
        Ok(self.session.synchronize(Instant::now() + TIMEOUT)?)
    }

    /// Copies elements between arrays, in order with steps.
    ///
    /// # Errors
    /// The device's; parts that are not there.
    pub fn copy(&self, to: Part, from: Part, len: u64) -> Result<(), MachineError> {
        let view = |part: Part| {
            let bytes = u64::from(self.memory.arrays[part.array].element.bytes());
            self.buffers[part.array].view(part.first * bytes, len * bytes)
        };
        Ok(self.session.copy(view(to)?, view(from)?)?)
    }

    /// Writes elements.
    ///
    /// # Errors
    /// The device's; more elements than there is room for.
    pub fn write<T: ElementType>(&self, to: Part, values: &[T]) -> Result<(), MachineError> {
        let bytes = size_of::<T>() as u64;
        let view = self.buffers[to.array].view(to.first * bytes, values.len() as u64 * bytes)?;
        Ok(self.session.write(view, values)?)
    }

    /// Reads elements.
    ///
    /// # Errors
    /// The device's; fewer elements than that.
    pub fn read<T: ElementType + Default>(&self, from: Part, len: u64) -> Result<Vec<T>, MachineError> {
        let mut values = vec![T::default(); len as usize];
        let bytes = size_of::<T>() as u64;
        let view = self.buffers[from.array].view(from.first * bytes, len * bytes)?;
        self.session.read(view, &mut values)?;
        Ok(values)
    }
}
