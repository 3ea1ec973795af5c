//! A GPT-2 that is trained and generates text with functions of the kernel library alone, beside the same model in PyTorch.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use gpt::config::Config;
use gpt::generate::Generation;
use gpt::machine::{Machine, Ready};
use gpt::program::Part;
use gpt::train::Training;
use serde::Deserialize;
use tempfile::TempDir;
use vm_accel::Graph;
use vm_cuda::CudaAccelerator;
use vm_ir::Trust;

use crate::gpu::Gpu;
use crate::peer;
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// Tokens of a prompt, and those that are generated behind it.
const PROMPT: u64 = 960;
const GENERATED: u64 = 64;
/// Steps on the same tokens whose losses are compared.
const STEPS: u32 = 6;
/// The learning rate of those, as in a warm-up: at the full one what is rounded alone makes the losses differ by a hundredth.
const LR: f64 = 1e-4;
/// Measurements of each kind, which take turns.
const ROUNDS: usize = 8;

/// The tests of losses and gradients.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![Test::new("losses and gradients of GPT-2", right)]
}

/// Those of a training step's time.
pub(crate) fn tests_of_training(_: &Arguments) -> Vec<Test> {
    vec![Test::new("a training step of GPT-2", train)]
}

/// Those of tokens, and their time.
pub(crate) fn tests_of_decoding(_: &Arguments) -> Vec<Test> {
    vec![Test::new("tokens of GPT-2", generate)]
}

/// A model on the device, as a guest's or as the host's own.
struct Model {
    training: Training,
    generation: Generation,
    /// The tokens of each step, for each sequence.
    history: Part,
    machine: Machine<CudaAccelerator>,
}

/// The same random tokens everywhere.
fn tokens(config: &Config) -> Vec<i32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 33) % config.vocabulary) as i32
    };
    (0..config.rows()).map(|_| next()).collect()
}

/// What follows each token; in the end anything.
fn targets(tokens: &[i32]) -> Vec<i32> {
    let mut targets = tokens.to_vec();
    targets.rotate_left(1);
    targets
}

impl Model {
    fn new(gpu: &Gpu, trust: Trust) -> anyhow::Result<Model> {
        let config = Config { lr: LR, ..Config::SMALL };
        let mut training = Training::of(&config);
        let parts = [training.arrays.weights, training.arrays.masters];
        let memory = &mut training.memory;
        let generation = Generation::of(&config, &training.parameters, parts, PROMPT, memory);
        let history = memory.array("history", vm_ir::Scalar::I32, &[GENERATED + 1, config.batch]);
        let machine = Machine::new(gpu.compiler(trust), memory)?;
        let model = Model { training, generation, history, machine };
        model.reset(&model.training.parameters.initial(&config, 1))?;
        Ok(model)
    }

    /// The state before the first step.
    fn reset(&self, masters: &[f32]) -> anyhow::Result<()> {
        let (arrays, machine, config) = (self.training.arrays, &self.machine, &self.training.config);
        let weights: Vec<half::bf16> = masters.iter().map(|master| half::bf16::from_f32(*master)).collect();
        machine.write(arrays.masters, masters)?;
        machine.write(arrays.weights, &weights)?;
        for moments in arrays.moments {
            machine.write(moments, &vec![0.0f32; masters.len()])?;
        }
        machine.write(arrays.dloss, &[1.0f32])?;
        let tokens = tokens(config);
        machine.write(arrays.tokens, &tokens)?;
        machine.write(arrays.targets, &targets(&tokens))?;
        // Each prompt is the beginning of a sequence.
        let prompts: Vec<i32> = tokens
            .chunks(config.tokens as usize)
            .flat_map(|sequence| &sequence[..PROMPT as usize])
            .copied()
            .collect();
        machine.write(self.generation.arrays.prompts, &prompts)?;
        let last: Vec<i32> = (1..=config.batch).map(|sequence| (sequence * PROMPT - 1) as i32).collect();
        machine.write(self.generation.arrays.last, &last)?;
        Ok(())
    }

    fn read(&self, part: Part) -> anyhow::Result<f32> {
        Ok(self.machine.read::<f32>(part, 1)?[0])
    }

    /// Generates behind the prompts; gives the tokens of each step, one for each sequence.
    fn generated(
        &self,
        prompt: &Graph<CudaAccelerator>,
        token: &Graph<CudaAccelerator>,
    ) -> anyhow::Result<Vec<i32>> {
        self.begin_prompt()?;
        self.machine.replay(prompt)?;
        self.continue_prompt(token)?;
        self.machine.synchronize()?;
        Ok(self.machine.read(self.history, (GENERATED + 1) * self.training.config.batch)?)
    }

    fn begin_prompt(&self) -> Result<(), gpt::machine::MachineError> {
        let (arrays, batch) = (self.generation.arrays, self.training.config.batch as usize);
        self.machine.write(arrays.lengths, &vec![PROMPT as i32; batch])?;
        self.machine.write(arrays.counts, &vec![PROMPT as i32 + 1; batch])
    }

    fn continue_prompt(&self, token: &Graph<CudaAccelerator>) -> Result<(), gpt::machine::MachineError> {
        let batch = self.training.config.batch;
        let newest = self.generation.arrays.token;
        for step in 0..GENERATED {
            self.machine.copy(self.history.at(step * batch), newest, batch)?;
            self.machine.replay(token)?;
        }
        self.machine.copy(self.history.at(GENERATED * batch), newest, batch)
    }
}

/// Runs the peers' script over files in a folder.
fn peer<T: serde::de::DeserializeOwned>(what: &str, folder: &Path) -> Result<T, String> {
    let config = Config::SMALL;
    let sizes = [config.layers, config.width, config.heads, config.tokens, config.vocabulary, config.batch];
    let sizes = sizes.map(|size| size.to_string()).join(",");
    let arguments = [
        what.to_owned(),
        folder.display().to_string(),
        sizes,
        PROMPT.to_string(),
        GENERATED.to_string(),
        STEPS.to_string(),
    ];
    peer::run(include_str!("peers.py"), &arguments)
}

fn write(path: &Path, bytes: impl Iterator<Item = [u8; 4]>) -> anyhow::Result<()> {
    Ok(std::fs::write(path, bytes.flatten().collect::<Vec<u8>>())?)
}

/// What the peer takes: parameters, their places, and tokens.
fn exchange(model: &Model) -> anyhow::Result<TempDir> {
    let folder = TempDir::new()?;
    let masters: Vec<f32> =
        model.machine.read(model.training.arrays.masters, model.training.parameters.len())?;
    write(&folder.path().join("masters"), masters.iter().map(|x| x.to_le_bytes()))?;
    let tokens = tokens(&model.training.config);
    write(&folder.path().join("tokens"), tokens.iter().map(|x| x.to_le_bytes()))?;
    write(&folder.path().join("targets"), targets(&tokens).iter().map(|x| x.to_le_bytes()))?;
    let places: Vec<_> = model
        .training
        .parameters
        .all
        .iter()
        .map(|parameter| (&parameter.name, parameter.offset, &parameter.extents))
        .collect();
    std::fs::write(folder.path().join("parameters.json"), serde_json::to_vec(&places)?)?;
    Ok(folder)
}

/// What the peer says of the same model.
#[derive(Deserialize)]
struct Reference {
    /// The loss in f32, and that of bf16.
    loss: f64,
    narrow_loss: f64,
    /// How far the gradients of bf16 are off, of each parameter's norm.
    off: Vec<f64>,
    norm: f64,
    /// Losses of steps in bf16.
    losses: Vec<f64>,
}

fn right(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let mut reference: Option<(Reference, Vec<f32>)> = None;
    for trust in [Trust::Trusted, Trust::Guest] {
        let begin = Instant::now();
        let mut model = Model::new(gpu, trust)?;
        let gradients = model.machine.prepare(&model.training.gradients)?;
        report.note(format!(
            "{trust:?}: {} launches, ready in {:.1} s",
            gradients.launches(),
            begin.elapsed().as_secs_f64()
        ));
        model.machine.run(&gradients)?;
        model.machine.synchronize()?;
        let parameters = &model.training.parameters;
        let arrays = model.training.arrays;
        let found: Vec<f32> = model.machine.read(arrays.gradients, parameters.len())?;
        let (loss, norm) = (f64::from(model.read(arrays.loss)?), f64::from(model.read(arrays.norm)?));
        if reference.is_none() {
            let folder = exchange(&model)?;
            match peer::<Reference>("right", folder.path()) {
                Ok(said) => {
                    let bytes = std::fs::read(folder.path().join("gradients"))?;
                    let numbers = bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]));
                    reference = Some((said, numbers.collect()));
                }
                Err(reason) => {
                    return crate::skip::skip(format!("without PyTorch: {reason}; the loss is {loss}"));
                }
            }
        }
        let (said, wanted) = reference.as_ref().context("no reference")?;
        let mut losses = vec![loss];
        for step in 1..STEPS {
            let update = model.machine.prepare(&model.training.update(step))?;
            model.machine.run(&update)?;
            model.machine.run(&gradients)?;
            losses.push(f64::from(model.read(arrays.loss)?));
        }
        report.note(format!(
            "{trust:?}: loss {loss:.5}, PyTorch's {:.5} in f32 and {:.5} in bf16; norm {norm:.4}, {:.4}",
            said.loss, said.narrow_loss, said.norm
        ));
        report.note(format!("{trust:?}: losses {losses:.4?}, PyTorch's in bf16 {:.4?}", said.losses));
        let mut worst = (0.0, String::new());
        let mut wrong = Vec::new();
        for (parameter, theirs) in parameters.all.iter().zip(&said.off) {
            let range = parameter.offset as usize..(parameter.offset + parameter.len()) as usize;
            let (mut off, mut all) = (0.0, 0.0);
            for (found, wanted) in found[range.clone()].iter().zip(&wanted[range]) {
                off += f64::from(found - wanted).powi(2);
                all += f64::from(*wanted).powi(2);
            }
            let off = (off / all).sqrt();
            let line = format!("{}: {off:.4}, PyTorch's bf16 {theirs:.4}", parameter.name);
            // NaN is wrong too.
            if off.is_nan() || off > 1.5 * theirs + 0.01 {
                wrong.push(line.clone());
            }
            if off > worst.0 {
                worst = (off, line);
            }
        }
        report.note(format!("{trust:?}: gradients are off by at most {} of their norms", worst.1));
        ensure!(
            wrong.is_empty(),
            "{trust:?}: {} gradients: {}",
            wrong.len(),
            wrong[..wrong.len().min(6)].join("; ")
        );
        ensure!((loss - said.loss).abs() <= 2e-3 * said.loss, "the loss is {loss}, not {}", said.loss);
        ensure!((norm - said.norm).abs() <= 2e-2 * said.norm, "the norm is {norm}, not {}", said.norm);
        for (step, (ours, theirs)) in losses.iter().zip(&said.losses).enumerate() {
            ensure!(
                (ours - theirs).abs() <= 2e-3 * theirs,
                "step {step}: the loss is {ours}, PyTorch's {theirs}"
            );
        }
    }
    Ok(())
}

/// Seconds of the peer's, by its name.
type Peers = Vec<(String, Vec<f64>)>;

fn figures(
    report: &mut Report,
    name: &str,
    unit: &str,
    [guest, own]: [Vec<f64>; 2],
    peers: Result<Peers, String>,
) {
    let milli = |seconds: Vec<f64>| Sample::of(seconds.iter().map(|seconds| seconds * 1e3).collect());
    let own = milli(own);
    let mut figure = |name: String, ours: Sample, peer, most: f64| {
        let (unit, aim) = (unit.to_owned(), Some(Aim::RatioAtMost(most)));
        report.figure(Figure { name, unit, ours, peer: Some(peer), aim });
    };
    figure(format!("{name}, as a guest's"), milli(guest), ("the host's own".into(), own.clone()), 1.03);
    match peers {
        Ok(peers) => {
            for (peer, seconds) in peers {
                figure(name.to_owned(), own.clone(), (format!("PyTorch {peer}"), milli(seconds)), 1.0 / 1.1);
            }
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
}

fn train(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let mut models = Vec::new();
    for trust in [Trust::Guest, Trust::Trusted] {
        let mut model = Model::new(gpu, trust)?;
        let gradients = model.machine.prepare(&model.training.gradients)?;
        let update = model.machine.prepare(&model.training.update(1))?;
        let graph = model.machine.capture(&gradients)?;
        models.push((model, gradients, update, graph));
    }
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (times, (model, _, update, graph)) in times.iter_mut().zip(&models) {
            const REPEATS: u32 = 3;
            let taken = model.machine.timed(|machine| {
                (0..REPEATS).try_for_each(|_| {
                    machine.replay(graph)?;
                    machine.run(update)
                })
            })?;
            if round > 0 {
                times.push(taken.as_secs_f64() / f64::from(REPEATS));
            }
        }
    }
    let (model, gradients, ..) = &models[1];
    let own = Sample::of(times[1].clone());
    let rate = Config::SMALL.operations() / own.median / 1e12;
    report.note(format!("{:.2} ms, {rate:.0} TFLOP/s; {} launches", own.median * 1e3, gradients.launches()));
    if let Ok(parts) = profile(model, gradients) {
        parts.into_iter().for_each(|line| report.note(line));
    }
    let folder = exchange(model)?;
    drop(models);
    figures(report, "a training step of GPT-2", "ms", times, peer("train", folder.path()));
    Ok(())
}

/// Where the time goes: milliseconds by kernel, the longest first.
fn profile(model: &Model, ready: &Ready<CudaAccelerator>) -> anyhow::Result<Vec<String>> {
    let mut by_kernel: Vec<(String, f64, u32)> = Vec::new();
    for (name, taken) in model.machine.profile(ready)? {
        let milli = taken.as_secs_f64() * 1e3;
        match by_kernel.iter_mut().find(|(other, ..)| *other == name) {
            Some((_, sum, count)) => {
                *sum += milli;
                *count += 1;
            }
            None => by_kernel.push((name, milli, 1)),
        }
    }
    by_kernel.sort_by(|a, b| b.1.total_cmp(&a.1));
    let all: f64 = by_kernel.iter().map(|(_, milli, _)| milli).sum();
    let mut lines = vec![format!("launches one by one: {all:.2} ms")];
    lines.extend(
        by_kernel
            .into_iter()
            .take(45)
            .map(|(name, milli, count)| format!("{milli:.3} ms in {count}: {name}")),
    );
    Ok(lines)
}

/// What the peer says of tokens.
#[derive(Deserialize)]
struct Judged {
    /// By how much the logit of a token is less than the greatest, at most: of ours, and of PyTorch's in bf16.
    short: f64,
    narrow_short: f64,
    /// The part of tokens that are PyTorch's in bf16.
    same: f64,
    peers: Peers,
}

fn generate(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let mut models = Vec::new();
    for trust in [Trust::Guest, Trust::Trusted] {
        let mut model = Model::new(gpu, trust)?;
        let prompt = model.machine.prepare(&model.generation.prompt)?;
        let token = model.machine.prepare(&model.generation.token)?;
        let [of_prompt, of_token] = [&prompt, &token].map(|steps| model.machine.capture(steps));
        models.push((model, of_prompt?, of_token?, prompt, token));
    }
    let mut tokens = Vec::new();
    let mut times = [Vec::new(), Vec::new()];
    for (model, prompt, token, ..) in &models {
        tokens.push(model.generated(prompt, token)?);
    }
    for _ in 0..ROUNDS {
        for (times, (model, prompt, token, ..)) in times.iter_mut().zip(&models) {
            model.begin_prompt()?;
            model.machine.replay(prompt)?;
            model.machine.synchronize()?;
            let taken = model.machine.timed(|_| model.continue_prompt(token))?;
            times.push(taken.as_secs_f64() / GENERATED as f64);
        }
    }
    let (model, .., ready) = &models[1];
    let own = Sample::of(times[1].clone());
    report.note(format!(
        "{:.1} µs a token of each of {} sequences; {} launches",
        own.median * 1e6,
        Config::SMALL.batch,
        ready.launches()
    ));
    model.begin_prompt()?;
    for line in profile(model, ready)? {
        report.note(line);
    }
    ensure!(tokens[0] == tokens[1], "a guest's tokens are others than the host's own");
    let folder = exchange(model)?;
    write(&folder.path().join("generated"), tokens[1].iter().map(|x| x.to_le_bytes()))?;
    drop(models);
    match peer::<Judged>("generate", folder.path()) {
        Ok(judged) => {
            let Judged { short, narrow_short, same, peers } = judged;
            report.note(format!("tokens fall short of the greatest logit by at most {short:.4}, PyTorch's in bf16 by {narrow_short:.4}; {:.0} % are the same", same * 100.0));
            figures(report, "a token of GPT-2", "ms", times, Ok(peers));
            ensure!(short <= 1.5 * narrow_short + 0.02, "a token's logit is {short} less than the greatest");
        }
        Err(reason) => figures(report, "a token of GPT-2", "ms", times, Err(reason)),
    }
    Ok(())
}
