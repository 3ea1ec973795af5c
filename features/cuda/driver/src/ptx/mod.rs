//! Programs of PTX, on this machine's processors.
//!
//! | part | does |
//! | --- | --- |
//! | `vm-ptx` | reads images, and makes a kernel of the IR for each shape of launches |
//! | `vm-jit` | compiles it as a guest's: what isn't in the arena of device addresses can't be touched |
//! | `machine` | runs it, with an eye on the time |
//!
//! The kernel's memory is the whole arena. What of it is not mapped faults, which ends the launch with
//! `CUDA_ERROR_ILLEGAL_ADDRESS`.

mod machine;
pub(crate) mod print;

use crate::{
    error::{Error, Result},
    link::{self, Input},
    memory::{By, Kind},
    module::{self, Refusal, Run, Shape},
    state::{self, State},
};
use machine::{Compiled, Failure, Timer};
use std::{
    collections::{BTreeSet, HashMap},
    io::Write,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};
use vm_ptx::{ErrorKind, Module, Options, Signature, Space, image};

/// The architecture that the device says it has.
const ARCHITECTURE: u32 = 90;
/// Shapes that are kept of a kernel.
const SHAPES: usize = 256;

/// A module of PTX.
struct Program {
    module: Module,
    max_registers: Option<u32>,
}

/// A kernel of it.
struct Kernel {
    program: Arc<Program>,
    name: String,
    signature: Signature,
    /// Bytes of shared memory of a block and of local memory of a thread.
    memory: OnceLock<(u64, u64)>,
    registers: OnceLock<u32>,
    compiled: Mutex<HashMap<Shape, Arc<Compiled>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says on standard error, once, what of a program is beyond this driver: its own message has only the number of an error.
fn tell(what: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = lock(&TOLD);
    if told.len() < 64 && told.insert(what.to_owned()) {
        // Nobody may be there to read it.
        let _ = writeln!(std::io::stderr(), "CUDA on the CPU: {what}");
    }
}

/// Which error of the driver one of PTX is.
fn code(error: &vm_ptx::Error) -> Error {
    match error.kind {
        ErrorKind::Syntax(_) | ErrorKind::Unknown(_) => Error::InvalidPtx,
        ErrorKind::Link(_) => Error::Unknown,
        _ => Error::NoBinaryForGpu,
    }
}

/// Converts an error of PTX to the driver's, and reports what is beyond this driver.
fn refusal(error: &vm_ptx::Error) -> Refusal {
    let (reason, error) = (error.to_string(), code(error));
    if [Error::NoBinaryForGpu, Error::Unknown].contains(&error) {
        tell(&reason);
    }
    Refusal { error, reason }
}

/// The PTX of an image.
fn text(image: &[u8]) -> Result<String, Refusal> {
    // The text that is left of what isn't even a head of machine code.
    if image == b"\x7fELF" {
        return Err(Error::InvalidImage.into());
    }
    // Where all of a fat binary's PTX is for newer devices, the oldest of it: there is no code of this one's that would be run instead.
    let entries = if crate::image::is_fat(image) { image::entries(image) } else { Ok(Vec::new()) };
    let entries =
        entries.map_err(|error| Refusal { error: Error::InvalidImage, reason: error.to_string() })?;
    let oldest = entries.iter().map(|entry| entry.architecture).min();
    let architecture = oldest.map_or(ARCHITECTURE, |oldest| oldest.max(ARCHITECTURE));
    image::ptx(image, architecture).map_err(|error| refusal(&error))
}

/// Reads an image. `max_registers` limits the registers of each kernel.
pub(crate) fn read(image: &[u8], max_registers: Option<u32>) -> Result<Arc<dyn module::Program>, Refusal> {
    let module = Module::parse(&text(image)?).map_err(|error| refusal(&error))?;
    Ok(Arc::new(Shared(Arc::new(Program { module, max_registers }))))
}

/// Reads the PTX of an input of a link.
pub(crate) fn inputs(kind: i32, name: &str, image: Vec<u8>) -> Result<Vec<Input>, Refusal> {
    let images = match kind {
        link::OBJECT | link::LIBRARY => image::objects(name, &image)
            .map_err(|error| Refusal { error: Error::InvalidImage, ..refusal(&error) })?,
        _ => vec![(name.to_owned(), &*image)],
    };
    let input = |(name, image): (String, &[u8])| {
        let input = Input { name, text: text(image)?, is_optional: kind == link::LIBRARY };
        // Only reads it: nothing needs it.
        let alone = vm_ptx::Input { name: &input.name, text: &input.text, optional: true };
        vm_ptx::link(&[alone], None).map_err(|error| refusal(&error))?;
        Ok(input)
    };
    images.into_iter().map(input).collect()
}

/// Links PTX.
pub(crate) fn link(inputs: &[Input], max_registers: Option<u32>) -> Result<String, Refusal> {
    let inputs: Vec<_> = inputs
        .iter()
        .map(|input| vm_ptx::Input { name: &input.name, text: &input.text, optional: input.is_optional })
        .collect();
    vm_ptx::link(&inputs, max_registers).map_err(|error| refusal(&error))
}

/// `sm_75` as 75.
fn architecture(target: &str) -> i32 {
    let number = target.strip_prefix("sm_").unwrap_or_default();
    number.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(ARCHITECTURE as i32)
}

/// The program, which its kernels share.
struct Shared(Arc<Program>);

impl module::Program for Shared {
    fn kernels(&self) -> Vec<String> {
        self.0.module.kernels().map(str::to_owned).collect()
    }

    fn kernel(&self, name: &str) -> Option<Arc<dyn module::Kernel>> {
        let signature = self.0.module.signature(name).ok()?;
        Some(Arc::new(Kernel {
            program: Arc::clone(&self.0),
            name: name.to_owned(),
            signature,
            memory: OnceLock::new(),
            registers: OnceLock::new(),
            compiled: Mutex::default(),
        }))
    }

    fn size(&self) -> u64 {
        self.0.module.data().size
    }

    fn variable(&self, name: &str) -> Option<(u64, u64)> {
        let variable = self.0.module.data().variables.iter().find(|variable| variable.name == name)?;
        Some((variable.offset, variable.size))
    }

    fn is_managed(&self, offset: u64) -> bool {
        let mut variables = self.0.module.data().variables.iter();
        variables.any(|v| v.managed && (v.offset..v.offset + v.size).contains(&offset))
    }

    fn has_managed(&self) -> bool {
        self.0.module.data().variables.iter().any(|variable| variable.managed)
    }

    fn contents(&self, address: u64) -> Vec<(u64, Vec<u8>)> {
        self.0.module.data().at(address)
    }
}

impl Kernel {
    fn registers(&self) -> i32 {
        let count = || self.program.module.registers(&self.name).unwrap_or_default();
        let count = *self.registers.get_or_init(count);
        self.program.max_registers.map_or(count, |most| count.min(most)) as i32
    }
}

impl module::Kernel for Kernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<(usize, usize)> {
        let place = |parameter: &vm_ptx::Parameter| (parameter.offset as usize, parameter.size as usize);
        self.signature.parameters.iter().map(place).collect()
    }

    fn attribute(&self, attribute: i32) -> i32 {
        let module = &self.program.module;
        let memory = || *self.memory.get_or_init(|| module.memory(&self.name).unwrap_or_default());
        let constants = module.data().variables.iter().filter(|v| v.space == Space::Const).map(|v| v.size);
        match attribute {
            1 => memory().0 as i32,
            3 => memory().1 as i32,
            2 => constants.sum::<u64>() as i32,
            4 => self.registers(),
            // Libraries choose the size of blocks by what the code that they get was compiled for.
            5 => architecture(self.program.module.target()),
            6 => ARCHITECTURE as i32,
            _ => 0,
        }
    }

    fn max_threads(&self) -> u32 {
        self.signature.max_threads.unwrap_or(1024)
    }

    /// They run one behind the other.
    fn cooperates(&self) -> bool {
        false
    }

    fn prepare(&self, shape: &Shape) -> Result<Arc<dyn Run>> {
        let mut compiled = lock(&self.compiled);
        if let Some(known) = compiled.get(shape) {
            return Ok(Arc::clone(known) as Arc<dyn Run>);
        }
        if compiled.len() >= SHAPES {
            compiled.clear();
        }
        let &Shape { block, shared, data } = shape;
        let options = Options { block, dynamic_shared: shared, data };
        let refused = |error: Error, reason: String| {
            tell(&format!("kernel {}: {reason}", self.name));
            // The image was loaded: the error is this kernel's alone.
            if error == Error::NoBinaryForGpu { Error::NotSupported } else { error }
        };
        let translate = || {
            let translated = self.program.module.translate(&self.name, &options);
            let translated = translated.map_err(|error| refused(code(&error), error.to_string()))?;
            Compiled::new(translated).map_err(|reason| refused(Error::NoBinaryForGpu, reason))
        };
        let made = Arc::new(machine::deep(translate)??);
        compiled.insert(*shape, Arc::clone(&made));
        Ok(made)
    }
}

impl Run for Compiled {
    fn run(
        &self,
        mut state: MutexGuard<'static, State>,
        context: u64,
        grid: [u32; 3],
        parameters: &[u8],
    ) -> (MutexGuard<'static, State>, Result) {
        let (arena, trap) = (state.kernels_range(), state.arena.trap());
        let block = match self.parameters_in_memory() {
            true => state.place(context, parameters).map(Some),
            false => Ok(None),
        };
        let ring = if self.prints() { state.ring(context).map(Some) } else { Ok(None) };
        let (block, ring) = match (block, ring) {
            (Ok(block), Ok(ring)) => (block, ring),
            (block, ring) => {
                // Nothing stays behind of a launch that there is no room for.
                let released =
                    block.as_ref().map_or(Ok(()), |block| block.map_or(Ok(()), |at| state.release(at)));
                return (state, block.map(drop).and(ring.map(drop)).and(released));
            }
        };
        drop(state);
        let timer = Timer::start();
        let launched = self.launch(grid, parameters, block, ring.as_ref(), &arena, &trap, &timer);
        let result = launched.map_err(|failure| match failure {
            Failure::Fault(at) => {
                let place = if arena.contains(&at) { format!("{at:#x}") } else { "an address".to_owned() };
                tell(&format!("kernel {} touched {place}, where no memory of the device is", self.name()));
                Error::IllegalAddress
            }
            Failure::Trap => Error::LaunchFailed,
            Failure::Late => Error::LaunchTimeout,
            Failure::Other(reason) => {
                tell(&format!("kernel {}: {reason}", self.name()));
                Error::LaunchOutOfResources
            }
        });
        let printed = match ring {
            Some(ring) if timer.is_late() => ring.release().map(|()| false),
            Some(ring) => ring.collect(context, || timer.is_late()),
            None => Ok(false),
        };
        drop(timer);
        state = state::lock();
        let released = block.map_or(Ok(()), |block| state.release(block));
        let result = match (result, &printed) {
            (Err(Error::LaunchFailed), Ok(true)) => Err(Error::Assert),
            (result, _) => result,
        };
        (state, result.and(released).and(printed.map(drop)))
    }
}

impl State {
    /// Puts a block of parameters into a context's memory.
    fn place(&mut self, context: u64, parameters: &[u8]) -> Result<u64> {
        let device = self.contexts.get(&context).ok_or(Error::InvalidContext)?.device;
        // With the word and the workspace of cooperative launches.
        let len = parameters.len().next_multiple_of(8) + 8 + 64;
        let at = self.allocate(device, context, len as u64, true, |offset| Kind::Data { offset })?;
        self.reach(at, parameters.len(), By::Copy(context), 3, false)
            .ok_or(Error::IllegalAddress)?
            .write(parameters);
        Ok(at)
    }
}
