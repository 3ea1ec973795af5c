//! Calls of a function on the device, and the time that they take beside copies of as many bytes.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use vm_accel::{Argument, Buffer, Kernel, Session, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, Module, Scalar, Trust, validate};
use vm_kernels::call::{Call, Entry, Operand, Region, WORKSPACE_ALIGN};
use vm_kernels::family::Resources;
use vm_passthrough::accelerator::CompiledKernel;

use super::work::Work;
use crate::gpu::{Gpu, named};

/// Measurements of each kind, which take turns. The first is not counted.
const ROUNDS: usize = 5;
/// Calls before a measurement: what ran before leaves the caches and the memory in another state.
const WARM: usize = 2;
/// Bytes that the calls of a measurement move at least, if the most calls do.
const MOVED: u64 = 2 << 30;
const CALLS: std::ops::RangeInclusive<u64> = 5..=48;
/// Bytes that lie between two uses of the same buffers: more than a cache has.
const APART: u64 = 512 << 20;
/// Bytes of each arena.
const ARENA: u64 = 3 << 30;
/// How long a measurement may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Kernels of a trust, by what they are.
pub(crate) type Loaded = HashMap<Entry, Kernel<CudaAccelerator>>;

/// Device memory for the buffers of all calls of a group, and its kernels.
pub(super) struct Bench {
    /// Random numbers, which no kernel writes.
    read: Buffer<CudaAccelerator>,
    /// What kernels write.
    written: Buffer<CudaAccelerator>,
    /// What copies write.
    copied: Buffer<CudaAccelerator>,
    kernels: [Loaded; 2],
    worker: Worker<CudaAccelerator>,
}

/// Seconds of a call, by measurement.
#[derive(Default)]
pub(super) struct Times {
    pub(super) own: Vec<f64>,
    pub(super) guest: Vec<f64>,
    pub(super) copy: Vec<f64>,
}

/// Numbers about a normal distribution, of bf16. Two of them are also an f32 of about the first one's value.
static NUMBERS: LazyLock<Vec<u16>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // The sum of four numbers of 16 bits has a variance of a third.
        let sum: u64 = [0, 16, 32, 48].map(|shift| state >> shift & 0xffff).iter().sum();
        (sum as f32 / 65_536.0 - 2.0) * 3f32.sqrt()
    };
    (0..1 << 20).map(|_| (next().to_bits() >> 16) as u16).collect()
});

/// A place that goes round an arena.
#[derive(Default)]
struct Cursor(u64);

impl Cursor {
    fn take(&mut self, bytes: u64) -> u64 {
        if self.0 + bytes > ARENA {
            self.0 = 0;
        }
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(4096);
        at
    }
}

/// A buffer of a call.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) of: &'a Buffer<CudaAccelerator>,
    pub(crate) at: u64,
}

impl<'a> Place<'a> {
    fn argument(self, region: &Region) -> anyhow::Result<Argument<'a, CudaAccelerator>> {
        let each = u64::from(region.element.bytes());
        let bytes = region.extents.iter().product::<u64>() * each;
        let strides: Vec<u64> = region.strides.iter().map(|stride| stride * each).collect();
        let view = self.of.view(self.at + region.offset, bytes)?;
        Ok(view.strided(&region.extents, &strides[..strides.len() - 1])?.into())
    }
}

/// The entries as kernels of both trusts, compiled by as many threads as there are processors.
pub(crate) fn compile(gpu: &Gpu, entries: &[Entry]) -> anyhow::Result<Vec<(Entry, Trust, CompiledKernel)>> {
    let all: Vec<(Entry, Trust)> =
        entries.iter().flat_map(|entry| [(*entry, Trust::Trusted), (*entry, Trust::Guest)]).collect();
    let left = Mutex::new(all);
    let one = |(entry, trust): (Entry, Trust)| -> anyhow::Result<_> {
        let kernel = entry.kernel(GuestAddr(0))?;
        let name = kernel.name().to_owned();
        let compiled = gpu.compile(&validate(Module::from(kernel), trust)?)?;
        Ok((entry, trust, named(&compiled, &name)?.clone()))
    };
    let next = || left.lock().ok().and_then(|mut left| left.pop());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let parts: anyhow::Result<Vec<Vec<_>>> = std::thread::scope(|scope| {
        let work = || std::iter::from_fn(next).map(one).collect::<anyhow::Result<Vec<_>>>();
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().map(|handle| handle.join().map_err(|_| anyhow!("a compiling thread"))?).collect()
    });
    Ok(parts?.into_iter().flatten().collect())
}

impl Bench {
    /// Compiles what the works need, and puts numbers onto the device.
    pub(super) fn new(gpu: &Gpu, works: &[Work], resources: &Resources) -> anyhow::Result<Bench> {
        let mut entries = Vec::new();
        for work in works {
            for launch in work.function.call(resources).with_context(|| work.to_string())?.launches {
                if !entries.contains(&launch.entry) {
                    entries.push(launch.entry);
                }
            }
        }
        let worker = gpu.worker()?;
        let mut kernels = [Loaded::new(), Loaded::new()];
        for (entry, trust, compiled) in compile(gpu, &entries)? {
            kernels[usize::from(trust == Trust::Guest)].insert(entry, worker.load(compiled.artifact())?);
        }
        let [read, written, copied] = [0; 3].map(|_| worker.allocate(ARENA));
        let (read, written, copied) = (read?, written?, copied?);
        let mut filled = 2 * NUMBERS.len() as u64;
        worker.write(read.view(0, filled)?, &NUMBERS)?;
        while filled < ARENA {
            let more = filled.min(ARENA - filled);
            worker.copy(read.view(filled, more)?, read.view(0, more)?)?;
            filled += more;
        }
        worker.copy(&written, &read)?;
        Ok(Bench { read, written, copied, kernels, worker })
    }

    /// Times calls of both trusts and copies, in turns.
    pub(super) fn time(&self, work: &Work, resources: &Resources) -> anyhow::Result<Times> {
        let call = work.function.call(resources)?;
        let indices = self.indices(work)?;
        let sets = APART.div_ceil(work.bytes).clamp(2, 64);
        let mut cursors = [Cursor::default(), Cursor::default()];
        let mut own = Vec::new();
        let mut guests = Vec::new();
        for _ in 0..sets {
            let places = self.places(work, &call, &indices, &mut cursors)?;
            for (kernels, all) in self.kernels.iter().zip([&mut own, &mut guests]) {
                all.push(launches(&call, kernels, &places)?);
            }
        }
        let calls = (MOVED / work.bytes.max(1)).clamp(*CALLS.start(), *CALLS.end()) as usize;
        let deadline = || Instant::now() + TIMEOUT;
        // A copy reads half of the bytes, and writes half.
        let half = work.bytes / 2;
        let copies = (ARENA / half).clamp(1, sets);
        let copy = |session: &Session<CudaAccelerator>, set: usize| {
            let from = set as u64 % copies * half;
            session.copy(self.copied.view(from, half)?, self.read.view(from, half)?)
        };
        let run = |session: &Session<CudaAccelerator>, launches: &Launches<'_>| {
            launches.iter().try_for_each(|(kernel, grid, arguments)| session.launch(kernel, *grid, arguments))
        };
        let times = self.worker.submit_and_wait(deadline(), |session| {
            let mut times = Times::default();
            let mut set = 0;
            let mut several = |f: &dyn Fn(usize) -> vm_accel::Result<()>| -> vm_accel::Result<f64> {
                let mut launches = |count: usize| {
                    (0..count).try_for_each(|_| {
                        set = (set + 1) % sets as usize;
                        f(set)
                    })
                };
                // While the device is busy with that, the calls are queued: none waits for the host.
                if work.bytes < APART {
                    session.copy(self.copied.view(0, ARENA / 2)?, self.copied.view(ARENA / 2, ARENA / 2)?)?;
                }
                launches(WARM)?;
                let taken = session.timed(deadline(), |_| launches(calls))?;
                vm_accel::Result::Ok(taken.as_secs_f64() / calls as f64)
            };
            for round in 0..=ROUNDS {
                let copied = several(&|set| copy(session, set))?;
                let trusted = several(&|set| run(session, &own[set]))?;
                let guest = several(&|set| run(session, &guests[set]))?;
                if round > 0 {
                    times.copy.push(copied);
                    times.own.push(trusted);
                    times.guest.push(guest);
                }
            }
            Ok(times)
        })?;
        Ok(times)
    }

    /// The integers of a call, below what they must be, by buffer.
    fn indices(&self, work: &Work) -> anyhow::Result<HashMap<usize, Buffer<CudaAccelerator>>> {
        let mut all = HashMap::new();
        for (number, buffer) in work.function.buffers().iter().enumerate() {
            let count = buffer.len().context("a buffer that is too long")?;
            let mixed = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % work.below;
            let bytes: Vec<u8> = match (buffer.element, buffer.access) {
                (Scalar::I32, Access::Read) => {
                    (0..count).flat_map(|index| (mixed(index) as u32).to_le_bytes()).collect()
                }
                (Scalar::I64, Access::Read) => {
                    (0..count).flat_map(|index| mixed(index).to_le_bytes()).collect()
                }
                _ => continue,
            };
            let there = self.worker.allocate(bytes.len() as u64)?;
            self.worker.write(&there, &bytes)?;
            all.insert(number, there);
        }
        Ok(all)
    }

    /// Where the buffers of one more call lie, and behind them the workspace.
    fn places<'a>(
        &'a self,
        work: &Work,
        call: &Call,
        indices: &'a HashMap<usize, Buffer<CudaAccelerator>>,
        [read, written]: &mut [Cursor; 2],
    ) -> anyhow::Result<Vec<Place<'a>>> {
        let mut places = Vec::new();
        for (number, buffer) in work.function.buffers().iter().enumerate() {
            if let Some(of) = indices.get(&number) {
                places.push(Place { of, at: 0 });
                continue;
            }
            let bytes =
                buffer.len().context("a buffer that is too long")? * u64::from(buffer.element.bytes());
            if buffer.access == Access::Read {
                places.push(Place { of: &self.read, at: read.take(bytes) });
                continue;
            }
            let at = written.take(bytes);
            if buffer.access == Access::ReadWrite {
                let there = self.written.view(at, bytes)?;
                match buffer.name {
                    // Means of squares are not negative: 0.0115 of f32.
                    "v" => self.worker.fill(there, 0x3c)?,
                    _ => self.worker.copy(there, self.read.view(at, bytes)?)?,
                }
            }
            places.push(Place { of: &self.written, at });
        }
        places.push(Place { of: &self.written, at: written.take(call.workspace.max(WORKSPACE_ALIGN)) });
        Ok(places)
    }

    /// Gives everything back.
    pub(super) fn end(self) -> anyhow::Result<()> {
        let Bench { read, written, copied, kernels, worker } = self;
        drop((read, written, copied, kernels));
        Ok(worker.stop(TIMEOUT)?)
    }
}

/// The launches of a call.
pub(crate) type Launches<'a> =
    Vec<(&'a Kernel<CudaAccelerator>, [u32; 3], Vec<Argument<'a, CudaAccelerator>>)>;

/// The launches of a call, of its buffers' places and, behind them, the workspace's.
pub(crate) fn launches<'a>(
    call: &Call,
    kernels: &'a Loaded,
    places: &[Place<'a>],
) -> anyhow::Result<Launches<'a>> {
    let of = |launch: &vm_kernels::call::Launch| -> anyhow::Result<_> {
        let kernel = kernels.get(&launch.entry).context("a kernel that was not compiled")?;
        let arguments = launch.operands.iter().map(|operand| match operand {
            Operand::Buffer(number, region) => places.get(*number).context("no buffer")?.argument(region),
            Operand::Workspace(region) => places.last().context("no workspace")?.argument(region),
            Operand::Number(bits, ty) => Ok(vm_accel::Scalar::from_bits(*bits, ty.scalar().bytes()).into()),
        });
        Ok((kernel, launch.grid, arguments.collect::<anyhow::Result<Vec<_>>>()?))
    };
    call.launches.iter().map(of).collect()
}
