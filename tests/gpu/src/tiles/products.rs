//! Products at sizes that matter, as their tables and the tuner choose them, beside cuBLAS by way of PyTorch: in graphs where a
//! launch is short, so that it is the kernels that are measured; the peer before ours and behind.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Deserialize;
use vm_accel::{Accelerator as _, Argument, Buffer, Kernel, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Scalar, Trust};
use vm_kernels::family::{Problem as _, Resources, Sample as Wanted};
use vm_kernels::gemm::{Activation, Batch, Epilogue, Gemm, Product, Scales};
use vm_passthrough::accelerator::{TuneError, TuneOptions, Tuner};

use super::occupancy::Occupancy;
use super::valid;
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::peer::{self, Peer};
use crate::skip::skip;
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// Measurements, launches of each, and those before that don't count.
const ROUNDS: usize = 9;
const LAUNCHES: u32 = 4;
/// Launches of a graph, where fewer operations than this make one.
const GRAPH: u32 = 20;
const SHORT: f64 = 2e11;
/// How long a product is tuned.
const TUNING: Duration = Duration::from_millis(1200);
/// Bytes of second factors that take turns, which is more than twice what a cache holds.
const WEIGHTS: u64 = 256 << 20;
/// Random numbers that a buffer repeats: a prime, so that no rows are alike.
const NUMBERS: u64 = 65_521;

/// A product, and the least that its rate is to be of its peer's.
#[derive(Clone, Copy)]
struct Work {
    product: Product,
    aim: Option<f64>,
    /// Is it one of those whose geometric mean has an aim?
    in_mean: bool,
}

impl Work {
    const fn of(product: Product, aim: f64) -> Work {
        Work { product, aim: Some(aim), in_mean: false }
    }

    const fn without_aim(product: Product) -> Work {
        Work { product, aim: None, in_mean: false }
    }

    fn all() -> Vec<Work> {
        use Scalar::{Bf16, F8E4M3, F16, F32, I8, I32, Tf32};
        let square = |n| Product::of(n, n, n);
        let turned = |product: Product| Product { b_transposed: true, ..product };
        let typed =
            |element, output, n| Product { element, output, b_transposed: true, ..Product::of(n, n, n) };
        let with = |product: Product, epilogue| Product { epilogue, ..product };
        let none = Epilogue::NONE;
        let scaled = |scales| Epilogue { scaled: scales == Scales::None, scales, ..none };
        let mut all = Vec::new();
        for n in [512, 1024, 2048, 4096, 8192, 16384] {
            all.push(Work { in_mean: n >= 1024, ..Work::of(square(n), 1.0) });
        }
        for (n, k) in [(4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096)] {
            all.push(Work { in_mean: true, ..Work::of(turned(Product::of(4096, n, k)), 1.0) });
        }
        for n in [512, 1024, 2048, 8192] {
            all.push(Work::of(turned(square(n)), 1.0));
        }
        for b_transposed in [false, true] {
            all.push(Work::of(Product { a_transposed: true, b_transposed, ..square(8192) }, 1.0));
        }
        all.push(Work::of(Product { element: F16, output: F16, ..square(8192) }, 1.0));
        all.extend([4096, 8192].map(|n| Work::of(typed(Tf32, F32, n), 1.0)));
        all.push(Work::without_aim(typed(F32, F32, 4096)));
        for scales in [Scales::None, Scales::Rows] {
            all.extend([4096, 8192].map(|n| Work::of(with(typed(F8E4M3, Bf16, n), scaled(scales)), 0.97)));
        }
        all.push(Work::without_aim(with(typed(F8E4M3, Bf16, 8192), scaled(Scales::Blocks))));
        all.push(Work::without_aim(typed(I8, I32, 8192)));
        // Orders that `wgmma` does not take of these types.
        for (element, output) in [(Tf32, F32), (F8E4M3, Bf16), (I8, I32)] {
            let epilogue = if element == F8E4M3 { scaled(Scales::None) } else { none };
            let product = Product { b_transposed: false, epilogue, ..typed(element, output, 4096) };
            all.push(Work::without_aim(product));
        }
        for m in [1, 8, 16, 32, 64] {
            all.push(Work::of(turned(Product::of(m, 4096, 4096)), 1.0));
        }
        for (n, k) in [(11008, 4096), (4096, 11008)] {
            all.push(Work::of(turned(Product::of(16, n, k)), 1.0));
        }
        let many = |batch, matrices, product: Product| Product { batch, matrices, ..product };
        all.push(Work::without_aim(many(Batch::Batched, 16, square(1024))));
        all.push(Work::without_aim(many(Batch::Batched, 64, square(512))));
        all.push(Work::without_aim(many(Batch::Grouped, 8, Product::of(8192, 4096, 4096))));
        for activation in [Activation::None, Activation::Relu, Activation::Silu, Activation::Gelu] {
            let epilogue = Epilogue { bias: true, activation, ..none };
            all.push(Work::without_aim(with(turned(square(8192)), epilogue)));
        }
        let plus = Epilogue { scaled: true, plus: true, ..none };
        all.push(Work::without_aim(with(turned(square(8192)), plus)));
        all
    }

    /// Launches that make a graph, if a launch is short.
    fn graph(&self) -> Option<u32> {
        (self.product.operations() < SHORT).then_some(GRAPH)
    }

    /// How many second factors take turns: where there are few rows they are a model's weights, which each layer has of its own, and
    /// which no cache holds.
    fn weights(&self) -> usize {
        let Product { n, k, element, .. } = self.product;
        let bytes = n * k * u64::from(element.bytes());
        if self.is_decode() { WEIGHTS.div_ceil(bytes) as usize } else { 1 }
    }

    /// As its peer is told of it.
    fn key(&self) -> String {
        let Product {
            m, n, k, element, output, a_transposed, b_transposed, batch, matrices, epilogue, ..
        } = self.product;
        let order = |turned| if turned { "t" } else { "n" };
        let batch = match batch {
            Batch::One => "one",
            Batch::Batched => "batched",
            Batch::Grouped => "grouped",
        };
        let epilogue = match epilogue {
            Epilogue { scales: Scales::Rows, .. } => "rows",
            Epilogue { scales: Scales::Blocks, .. } => "blocks",
            Epilogue { plus: true, .. } => "plus",
            Epilogue { scaled: true, .. } => "alpha",
            Epilogue { activation: Activation::Relu, .. } => "relu",
            Epilogue { activation: Activation::Silu, .. } => "silu",
            Epilogue { activation: Activation::Gelu, .. } => "gelu",
            Epilogue { bias: true, .. } => "bias",
            _ => "none",
        };
        let (a, b, graph) = (order(a_transposed), order(b_transposed), self.graph().unwrap_or(0));
        let weights = self.weights();
        format!("{m} {n} {k} {element} {output} {a}{b} {batch} {matrices} {epilogue} {weights} {graph}")
    }

    fn name(&self) -> String {
        let key = self.key();
        let words: Vec<&str> = key.split(' ').collect();
        let [m, n, k, element, output, order, batch, matrices, epilogue, _, _] = words[..] else {
            return key;
        };
        let batch = if batch == "one" { String::new() } else { format!(", {batch} {matrices}") };
        let epilogue = if epilogue == "none" { String::new() } else { format!(", {epilogue}") };
        let graph = match self.graph() {
            Some(_) if self.is_decode() => ", in graphs, of weights in turn",
            Some(_) => ", in graphs",
            None => "",
        };
        format!("product {m} × {n} × {k}, {order}, {element} to {output}{batch}{epilogue}{graph}")
    }

    /// Few rows are bound by memory: what counts is the time.
    fn is_decode(&self) -> bool {
        self.product.m <= 64
    }
}

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    let works = Work::all().into_iter();
    let mut tests: Vec<Test> =
        works.map(|work| Test::new(work.name(), move |gpu, report| run(gpu, work, report))).collect();
    tests.push(Test::new("the geometric mean over squares from 1K to 16K and a 7B model's", |_, report| {
        mean(report)
    }));
    tests.push(Test::new("registers, spills, stages and blocks of a multiprocessor", occupancy));
    tests
}

/// Ratios to the peer of those whose mean counts.
static RATIOS: Mutex<Vec<f64>> = Mutex::new(Vec::new());

/// Variants that the tuner chose, by name.
static CHOSEN: Mutex<BTreeMap<String, Gemm>> = Mutex::new(BTreeMap::new());

fn mean(report: &mut Report) -> anyhow::Result<()> {
    let ratios = RATIOS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let wanted = Work::all().iter().filter(|work| work.in_mean).count();
    if ratios.len() < wanted {
        return skip(format!("{} of {wanted} have a peer in this process", ratios.len()));
    }
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    report.figure(Figure {
        name: format!("products of bf16, geometric mean of {wanted} ratios to cuBLAS"),
        unit: "of cuBLAS".into(),
        ours: Sample::of(vec![mean]),
        peer: Some(("cuBLAS".into(), Sample::of(vec![1.0]))),
        aim: Some(Aim::RatioAtLeast(0.97)),
    });
    Ok(())
}

fn resources(gpu: &Gpu) -> Resources {
    vm_passthrough::accelerator::resources(gpu.accelerator.info())
}

/// An argument of all launches.
enum Held {
    View(Buffer<CudaAccelerator>, Vec<u64>),
    Number(vm_accel::Scalar),
}

fn hold(worker: &Worker<CudaAccelerator>, (number, wanted): (usize, Wanted)) -> anyhow::Result<Held> {
    let (element, extents, values) = match wanted {
        Wanted::Number(bits, ty) => return Ok(Held::Number(vm_accel::Scalar::from_bits(bits, ty.bytes()))),
        Wanted::Values(tensor) => (tensor.element, tensor.extents.clone(), Some(tensor)),
        Wanted::Random { element, extents } => (element, extents, None),
    };
    let size = u64::from(element.bytes());
    let bytes = size * extents.iter().product::<u64>();
    let numbers = values.map_or_else(|| random(number as u64, element), |tensor| tensor.bytes);
    let buffer = worker.allocate(bytes)?;
    // The first by the host, the others by the device.
    let mut filled = bytes.min(numbers.len() as u64);
    worker.write(buffer.view(0, filled)?, &numbers[..filled as usize])?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        worker.copy(buffer.view(filled, more)?, buffer.view(0, more)?)?;
        filled += more;
    }
    Ok(Held::View(buffer, extents))
}

/// Numbers from -1 to 1, integers from -100 to 100: they take as much power as any.
fn random(seed: u64, element: Scalar) -> Vec<u8> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let unit = (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0;
        if element.is_int() { (unit * 100.0).round() } else { unit }
    };
    Tensor::from_f64s(element, &[NUMBERS], (0..NUMBERS).map(|_| next())).bytes
}

fn run(gpu: &Gpu, work: Work, report: &mut Report) -> anyhow::Result<()> {
    let (product, resources) = (work.product, resources(gpu));
    let variants = product.variants(&resources);
    let first = *variants.first().context("no variant fits")?;
    let options = TuneOptions { limit: TUNING, ..TuneOptions::default() };
    let tuned = match Tuner::new(gpu.compiler(Trust::Guest)).tune(&product, &options) {
        Err(error @ TuneError::NoneMeasured { .. }) => return skip(error.to_string()),
        tuned => tuned?.variant,
    };
    CHOSEN.lock().unwrap_or_else(PoisonError::into_inner).insert(tuned.name(), tuned);
    let worker = gpu.worker()?;
    let begin = Instant::now();
    let load = |variant: &Gemm, trust| -> anyhow::Result<(Kernel<CudaAccelerator>, [u32; 3])> {
        let kernel = variant.kernel(GuestAddr(0))?;
        let name = kernel.name().to_owned();
        let compiled = gpu.compile(&valid(gpu, kernel, trust)?)?;
        Ok((worker.load(named(&compiled, &name)?.artifact())?, product.grid(variant, &resources)))
    };
    let mut kernels = vec![load(&tuned, Trust::Guest)?, load(&tuned, Trust::Trusted)?];
    if first != tuned {
        kernels.push(load(&first, Trust::Trusted)?);
    }
    let loaded = begin.elapsed();
    let held = product.arguments().into_iter().enumerate().map(|each| hold(&worker, each));
    let mut held = held.collect::<anyhow::Result<Vec<_>>>()?;
    let weights = product.arguments().into_iter().enumerate().nth(1).context("no second factor")?;
    for _ in 1..work.weights() {
        held.push(hold(&worker, (weights.0, weights.1.clone()))?);
    }
    let all = held.iter().map(|held| match held {
        Held::View(buffer, extents) => Ok(buffer.shaped(extents)?.into()),
        Held::Number(number) => Ok(Argument::Scalar(*number)),
    });
    let mut all = all.collect::<anyhow::Result<Vec<Argument<'_, _>>>>()?;
    // One after the other has its turn as the second factor.
    let others = all.split_off(all.len() + 1 - work.weights());
    let mut arguments = vec![all];
    for other in others {
        let mut next = arguments[0].clone();
        next[1] = other;
        arguments.push(next);
    }
    let deadline = || Instant::now() + Duration::from_secs(60);
    let before = theirs(&work);
    let launches = work.graph().unwrap_or(LAUNCHES);
    let times = worker.submit_and_wait(deadline(), |session| {
        let launch = |(kernel, grid): &(Kernel<CudaAccelerator>, [u32; 3])| {
            let mut turns = (0..launches as usize).map(|turn| &arguments[turn % arguments.len()]);
            turns.try_for_each(|arguments| session.launch(kernel, *grid, arguments))
        };
        // Once, as code comes to the device, and then until it is warm.
        kernels.iter().try_for_each(launch)?;
        peer::warm(|| session.timed(deadline(), |_| launch(&kernels[1])).map(drop))?;
        let graphs = kernels.iter().map(|kernel| match work.graph() {
            Some(_) => session.capture(|_| launch(kernel)).map(Some),
            None => Ok(None),
        });
        let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        let mut times = vec![Vec::new(); kernels.len()];
        for _ in 0..ROUNDS {
            for ((times, kernel), graph) in times.iter_mut().zip(&kernels).zip(&graphs) {
                let once = || match graph {
                    Some(graph) => session.replay(graph),
                    None => launch(kernel),
                };
                once()?;
                let taken = session.timed(deadline(), |_| once())?;
                times.push(taken.as_secs_f64() / f64::from(launches));
            }
        }
        Ok(times)
    })?;
    drop(arguments);
    drop((held, kernels));
    worker.stop(TIMEOUT)?;
    let unit = if work.is_decode() { "µs" } else { "TFLOP/s" };
    let sample = |seconds: &[f64]| {
        let of = |seconds: &f64| match work.is_decode() {
            true => seconds * 1e6,
            false => product.operations() / seconds / 1e12,
        };
        Sample::of(seconds.iter().map(of).collect())
    };
    let aim = |bound: f64| match work.is_decode() {
        true => Aim::RatioAtMost(1.0 / bound),
        false => Aim::RatioAtLeast(bound),
    };
    let mut figure = |name: String, ours: &Sample, peer: Option<(String, Sample)>, aim: Option<Aim>| {
        report.figure(Figure { name, unit: unit.into(), ours: ours.clone(), peer, aim });
    };
    let (name, guests, own) = (work.name(), sample(&times[0]), sample(&times[1]));
    let host = ("the host's own".to_owned(), own.clone());
    figure(format!("{name}, as a guest's"), &guests, Some(host), Some(aim(0.97)));
    let both = before.and_then(|before| Ok([before, theirs(&work)?].concat()));
    let (peer, reason) = match both {
        Ok(seconds) => (Some(("cuBLAS".to_owned(), sample(&seconds))), String::new()),
        Err(reason) => (None, reason),
    };
    if let (Some((_, peer)), true) = (&peer, work.in_mean) {
        let ratio = own.median / peer.median;
        RATIOS.lock().unwrap_or_else(PoisonError::into_inner).push(ratio);
    }
    let wanted = work.aim.filter(|_| peer.is_some()).map(aim);
    figure(format!("{name}, tuned"), &own, peer.clone(), wanted);
    if let Some(seconds) = times.get(2) {
        figure(format!("{name}, first of its table"), &sample(seconds), peer, None);
    }
    report.note(format!("tuned: {}; first: {}", tuned.name(), first.name()));
    report.note(format!("compiled, assembled and loaded in {:.0} ms", loaded.as_secs_f64() * 1e3));
    if !reason.is_empty() {
        report.note(format!("without a peer: {reason}"));
    }
    Ok(())
}

/// What the assembler says of the first variant of each table, and of those that the tuner chose in this process.
fn occupancy(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let resources = resources(gpu);
    let firsts =
        Work::all().into_iter().filter_map(|work| work.product.variants(&resources).first().copied());
    let mut variants: BTreeMap<String, Gemm> = firsts.map(|variant| (variant.name(), variant)).collect();
    variants.extend(CHOSEN.lock().unwrap_or_else(PoisonError::into_inner).clone());
    let mut spilled = Vec::new();
    for (name, variant) in variants {
        let Some(occupancy) = Occupancy::of(gpu, variant.kernel(GuestAddr(0))?)? else { continue };
        report.note(format!("{name}: {occupancy}, {} stages", variant.stages));
        if occupancy.spills > 0 {
            spilled.push(name);
        }
    }
    ensure!(spilled.is_empty(), "spill: {}", spilled.join(", "));
    Ok(())
}

/// What PyTorch answers: seconds of a call by measurement, or why there are none.
#[derive(Deserialize)]
struct Answer {
    seconds: Vec<f64>,
    reason: String,
}

/// Seconds of a call of PyTorch's by measurement, or why there are none.
fn theirs(work: &Work) -> Result<Vec<f64>, String> {
    static PEER: Mutex<Option<Result<Peer, String>>> = Mutex::new(None);
    let mut peer = PEER.lock().unwrap_or_else(PoisonError::into_inner);
    let peer = peer.get_or_insert_with(|| Peer::start(include_str!("products.py")));
    let answer = peer.as_mut().map_err(|reason| reason.clone())?.ask::<Answer>(&work.key());
    let answer = answer.inspect_err(|reason| *peer = Err(reason.clone()))?;
    if answer.seconds.is_empty() { Err(answer.reason) } else { Ok(answer.seconds) }
}
