//! Trains a small GPT on a few verses, on this machine's processor, and has it go on from the first line.
//!
//! ```sh
//! cargo run -p gpt --release
//! cargo run -p gpt --release -- gpt.vgr
//! ```
//!
//! With a file's name the trained model is written there as one graph of array operations, which `vm-service launch` runs on an NPU.

use std::error::Error;
use std::sync::Arc;

use gpt::config::Config;
use gpt::export::{Weights, next_token};
use gpt::generate::Generation;
use gpt::machine::Machine;
use gpt::train::Training;
use vm_ir::Scalar;
use vm_runtime::{CpuAccelerator, CpuJITCompiler};

/// William Blake, "Auguries of Innocence".
const TEXT: &str = "To see a World in a Grain of Sand\nAnd a Heaven in a Wild Flower\nHold Infinity in the palm of your hand\nAnd Eternity in an hour\n";
const STEPS: u32 = 60;
const PROMPT: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    // A token is a byte.
    let config = Config { tokens: 64, vocabulary: 128, batch: 2, ..Config::TINY };
    let mut training = Training::of(&config);
    let arrays = training.arrays;
    let generation = Generation::of(
        &config,
        &training.parameters,
        [arrays.weights, arrays.masters],
        PROMPT as u64,
        &mut training.memory,
    );
    let compiler = CpuJITCompiler::new(Arc::new(CpuAccelerator::new()?));
    let mut machine = Machine::new(compiler, &training.memory)?;
    let masters = training.parameters.initial(&config, 1);
    let weights: Vec<half::bf16> = masters.iter().map(|master| half::bf16::from_f32(*master)).collect();
    machine.write(arrays.masters, &masters)?;
    machine.write(arrays.weights, &weights)?;
    machine.write(arrays.dloss, &[1.0f32])?;

    let text: Vec<i32> = TEXT.bytes().map(i32::from).collect();
    let gradients = machine.prepare(&training.gradients)?;
    let length = config.tokens as usize;
    for step in 1..=STEPS {
        // Two parts of the text, from places that move on.
        let first = |sequence: usize| (step as usize * 29 + sequence * 67) % (text.len() - length);
        let parts = |from: usize| -> Vec<i32> {
            (0..config.batch as usize).flat_map(|at| &text[first(at) + from..][..length]).copied().collect()
        };
        machine.write(arrays.tokens, &parts(0))?;
        machine.write(arrays.targets, &parts(1))?;
        machine.run(&gradients)?;
        let update = machine.prepare(&training.update(step))?;
        machine.run(&update)?;
        if step % 10 == 0 {
            println!("step {step}: loss {:.3}", machine.read::<f32>(arrays.loss, 1)?[0]);
        }
    }

    if let Some(path) = std::env::args_os().nth(1) {
        // NPUs have no bf16, and take one sequence.
        let config = Config { element: Scalar::F32, batch: 1, ..config };
        let masters: Vec<f32> = machine.read(arrays.masters, training.parameters.len())?;
        let graph = next_token(&config, config.tokens, Weights::Constants(&masters))?;
        std::fs::write(&path, vm_graph::encode(&graph)?)?;
        println!("{} has the model, of {} operations", path.display(), graph.nodes.len());
    }

    let of = generation.arrays;
    let prompt = &text[..PROMPT];
    machine.write(of.prompts, &prompt.repeat(config.batch as usize))?;
    machine.write(of.last, &[PROMPT as i32 - 1, 2 * PROMPT as i32 - 1])?;
    machine.write(of.lengths, &[PROMPT as i32; 2])?;
    machine.write(of.counts, &[PROMPT as i32 + 1; 2])?;
    let [first, next] = [&generation.prompt, &generation.token].map(|steps| machine.prepare(steps));
    let next = next?;
    machine.run(&first?)?;
    let mut tokens = prompt.to_vec();
    while tokens.len() < length {
        tokens.push(machine.read::<i32>(of.token, 1)?[0]);
        machine.run(&next)?;
    }
    let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
    println!("{}", String::from_utf8_lossy(&bytes));
    Ok(())
}
