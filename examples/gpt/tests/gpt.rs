//! A small model on this machine's processor against its definition in f64: loss, gradients, steps and tokens.

mod reference;

use std::sync::Arc;

use gpt::config::Config;
use gpt::generate::Generation;
use gpt::machine::Machine;
use gpt::train::Training;
use half::bf16;
use reference::Reference;
use vm_kernels::cases::numbers;
use vm_runtime::{CpuAccelerator, CpuJITCompiler};

fn compiler() -> CpuJITCompiler {
    CpuJITCompiler::new(Arc::new(CpuAccelerator::new().unwrap()))
}

/// Numbers below a bound, the same everywhere.
fn tokens(seed: u64, count: u64, below: u64) -> Vec<i32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) % below
    };
    (0..count).map(|_| next() as i32).collect()
}

/// A training on the processor, with what its weights are rounded to.
struct Trained {
    training: Training,
    machine: Machine<CpuAccelerator>,
    tokens: Vec<i32>,
    targets: Vec<i32>,
}

impl Trained {
    fn new(config: &Config) -> Trained {
        let training = Training::of(config);
        let machine = Machine::new(compiler(), &training.memory).unwrap();
        // Norms and biases that are not all the same, and weights that matter.
        let mut masters = training.parameters.initial(config, 1);
        for parameter in &training.parameters.all {
            let of = &mut masters[parameter.offset as usize..][..parameter.len() as usize];
            let noise = numbers(parameter.offset + 9, parameter.len());
            let factor = if parameter.extents.len() > 1 { 2.0 } else { 1.0 };
            of.iter_mut().zip(noise).for_each(|(x, noise)| *x = factor * *x + 0.05 * noise as f32);
        }
        let weights: Vec<bf16> = masters.iter().map(|master| bf16::from_f32(*master)).collect();
        let arrays = training.arrays;
        machine.write(arrays.masters, &masters).unwrap();
        machine.write(arrays.weights, &weights).unwrap();
        machine.write(arrays.dloss, &[1.0f32]).unwrap();
        let tokens = tokens(3, config.rows(), config.vocabulary);
        let targets: Vec<i32> =
            tokens.iter().map(|token| (token * 5 + 1) % config.vocabulary as i32).collect();
        machine.write(arrays.tokens, &tokens).unwrap();
        machine.write(arrays.targets, &targets).unwrap();
        Trained { training, machine, tokens, targets }
    }

    /// The model with the weights that the kernels take: norms take masters.
    fn reference(&self) -> Reference<'_> {
        let Training { parameters, arrays, config, .. } = &self.training;
        let masters: Vec<f32> = self.machine.read(arrays.masters, parameters.len()).unwrap();
        let weights: Vec<bf16> = self.machine.read(arrays.weights, parameters.len()).unwrap();
        let mut values: Vec<f64> = weights.iter().map(|weight| weight.to_f64()).collect();
        for parameter in parameters.all.iter().filter(|parameter| parameter.is_norm()) {
            let range = parameter.offset as usize..(parameter.offset + parameter.len()) as usize;
            for at in range {
                values[at] = masters[at].into();
            }
        }
        Reference { config, parameters, values }
    }
}

#[test]
fn the_loss_and_all_gradients() {
    let config = Config::TINY;
    let mut trained = Trained::new(&config);
    let ready = trained.machine.prepare(&trained.training.gradients).unwrap();
    trained.machine.run(&ready).unwrap();
    trained.machine.synchronize().unwrap();
    let Trained { training, machine, tokens, targets } = &trained;
    let arrays = training.arrays;
    let mut reference = trained.reference();
    let loss = f64::from(machine.read::<f32>(arrays.loss, 1).unwrap()[0]);
    let expected = reference.loss(tokens, targets);
    assert!((loss - expected).abs() < 2e-3 * expected, "the loss is {loss}, not {expected}");

    let gradients: Vec<f32> = machine.read(arrays.gradients, training.parameters.len()).unwrap();
    let norm = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let found = f64::from(machine.read::<f32>(arrays.norm, 1).unwrap()[0]);
    assert!((found - norm).abs() < 1e-5 * norm, "the norm is {found}, not {norm}");
    let scale = machine.read::<f32>(arrays.clip, 1).unwrap()[0];
    assert!((f64::from(scale) - (1.0 / norm).min(1.0)).abs() < 1e-5, "{scale} does not clip {norm}");

    // The greatest of each parameter's and some others, against differences.
    let step = 1e-4;
    let mut wrong = Vec::new();
    for parameter in &training.parameters.all {
        let first = parameter.offset as usize;
        let of = &gradients[first..][..parameter.len() as usize];
        let rms = (of.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / of.len() as f64).sqrt();
        let greatest = (0..of.len()).max_by(|a, b| of[*a].abs().total_cmp(&of[*b].abs())).unwrap();
        for at in [greatest, of.len() / 3, of.len() - 1] {
            let value = reference.values[first + at];
            let mut moved = |by: f64| {
                reference.values[first + at] = value + by;
                reference.loss(tokens, targets)
            };
            let expected = (moved(step) - moved(-step)) / (2.0 * step);
            reference.values[first + at] = value;
            let (found, name) = (f64::from(of[at]), &parameter.name);
            let off = (found - expected).abs();
            if off > 0.03 * expected.abs() + 0.05 * rms {
                wrong.push(format!("{name}[{at}]: {found}, not {expected}; as a rule {rms}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_step_is_adamw() {
    let config = Config { layers: 1, ..Config::TINY };
    let mut trained = Trained::new(&config);
    let arrays = trained.training.arrays;
    let count = trained.training.parameters.len();
    let ready = trained.machine.prepare(&trained.training.gradients).unwrap();
    let mut masters: Vec<f64> =
        trained.machine.read::<f32>(arrays.masters, count).unwrap().into_iter().map(f64::from).collect();
    let (mut m, mut v) = (vec![0.0; masters.len()], vec![0.0; masters.len()]);
    let [beta1, beta2] = config.betas;
    let mut losses = Vec::new();
    for step in 1..=4 {
        trained.machine.run(&ready).unwrap();
        losses.push(trained.machine.read::<f32>(arrays.loss, 1).unwrap()[0]);
        let gradients: Vec<f32> = trained.machine.read(arrays.gradients, count).unwrap();
        let norm = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let clip = (f64::from(config.clip) / (norm + 1e-6)).min(1.0);
        let update = trained.machine.prepare(&trained.training.update(step)).unwrap();
        trained.machine.run(&update).unwrap();
        for (at, gradient) in gradients.iter().enumerate() {
            let decay =
                if at < trained.training.parameters.sizes[0] as usize { config.weight_decay } else { 0.0 };
            let gradient = f64::from(*gradient) * clip;
            m[at] = beta1 * m[at] + (1.0 - beta1) * gradient;
            v[at] = beta2 * v[at] + (1.0 - beta2) * gradient * gradient;
            let [by_m, by_v] = [beta1, beta2].map(|beta| 1.0 - beta.powi(step as i32));
            let change = m[at] / by_m / ((v[at] / by_v).sqrt() + config.adam_epsilon);
            masters[at] = masters[at] * (1.0 - config.lr * decay) - config.lr * change;
        }
        let found: Vec<f32> = trained.machine.read(arrays.masters, count).unwrap();
        let weights: Vec<bf16> = trained.machine.read(arrays.weights, count).unwrap();
        for (at, (found, expected)) in found.iter().zip(&masters).enumerate() {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "step {step}, {at}: {found}, not {expected}"
            );
            assert_eq!(weights[at], bf16::from_f32(*found), "step {step}, {at}");
        }
    }
    assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?} do not fall");
}

#[test]
fn tokens_are_the_likeliest() {
    let config = Config::TINY;
    const PROMPT: u64 = 9;
    let mut trained = Trained::new(&config);
    let arrays = trained.training.arrays;
    let generation = Generation::of(
        &config,
        &trained.training.parameters,
        [arrays.weights, arrays.masters],
        PROMPT,
        &mut trained.training.memory,
    );
    // A device with the arrays of the generation too.
    let whole = Machine::new(compiler(), &trained.training.memory).unwrap();
    let count = trained.training.parameters.len();
    let masters: Vec<f32> = trained.machine.read(arrays.masters, count).unwrap();
    let weights: Vec<bf16> = trained.machine.read(arrays.weights, count).unwrap();
    whole.write(arrays.masters, &masters).unwrap();
    whole.write(arrays.weights, &weights).unwrap();
    trained.machine = whole;
    let (machine, of) = (&mut trained.machine, generation.arrays);
    let mut sequences: Vec<Vec<i32>> =
        (0..config.batch).map(|sequence| tokens(sequence + 7, PROMPT, config.vocabulary)).collect();
    machine.write(of.prompts, &sequences.concat()).unwrap();
    machine.write(of.last, &[PROMPT as i32 - 1, 2 * PROMPT as i32 - 1]).unwrap();
    machine.write(of.lengths, &[PROMPT as i32; 2]).unwrap();
    machine.write(of.counts, &[PROMPT as i32 + 1; 2]).unwrap();
    let prompt = machine.prepare(&generation.prompt).unwrap();
    let token = machine.prepare(&generation.token).unwrap();
    machine.run(&prompt).unwrap();
    let reference = trained.reference();
    for _ in PROMPT..config.tokens {
        let newest: Vec<i32> = trained.machine.read(of.token, config.batch).unwrap();
        let logits: Vec<bf16> = trained.machine.read(of.logits, config.batch * config.vocabulary).unwrap();
        let logits = logits.chunks(config.vocabulary as usize);
        for ((sequence, token), found) in sequences.iter_mut().zip(newest).zip(logits) {
            let expected = reference.logits(sequence).pop().unwrap();
            let greatest = expected.iter().copied().fold(f64::MIN, f64::max);
            for (found, expected) in found.iter().zip(&expected) {
                let off = (found.to_f64() - expected).abs();
                assert!(
                    off < 0.03 * greatest,
                    "a logit is {found}, not {expected}; the greatest is {greatest}"
                );
            }
            assert!(expected[token as usize] > 0.97 * greatest, "{token} is not the likeliest");
            sequence.push(token);
        }
        trained.machine.run(&token).unwrap();
    }
}
