//! A model as one graph against its definition in f64.

#[allow(dead_code)]
mod reference;

use gpt::config::Config;
use gpt::export::{ExportError, Port, Weights, graph, next_token};
use gpt::parameters::Parameters;
use gpt::program::{Memory, Part, Steps};
use reference::Reference;
use vm_graph::{Element, ValidGraph, evaluate};
use vm_ir::Scalar;
use vm_kernels::elementwise::{Chain, Elementwise, Op};

const CONFIG: Config = Config {
    element: Scalar::F32,
    width: 64,
    heads: 4,
    tokens: 12,
    vocabulary: 40,
    layers: 2,
    batch: 2,
    ..Config::TINY
};

/// Parameters that matter: norms and biases that differ, weights that are not small.
fn masters(parameters: &Parameters, config: &Config) -> Vec<f32> {
    let noise = |at: usize| (at as f32 * 0.618).fract() * 0.2 - 0.1;
    let initial = parameters.initial(config, 1).into_iter().enumerate();
    initial.map(|(at, x)| if x == 0.0 || x == 1.0 { x + noise(at) } else { 5.0 * x }).collect()
}

fn tokens(sequence: u64, config: &Config) -> Vec<i32> {
    (0..config.tokens).map(|at| ((sequence * 5 + at * at * 7 + 3) % config.vocabulary) as i32).collect()
}

/// The graph's logits and tokens behind so many tokens of each sequence, beside those of the definition; the rest is padding.
fn check(config: &Config, graph: &ValidGraph, rest: &[Vec<f64>], reference: &Reference<'_>, tolerance: f64) {
    let lengths = [config.tokens as usize, 5];
    let sequences: Vec<Vec<i32>> = (0..config.batch).map(|sequence| tokens(sequence, config)).collect();
    let prompts = sequences.concat().into_iter().map(f64::from).collect();
    let last = (0..).zip(lengths).map(|(row, length)| (row * config.tokens as usize + length - 1) as f64);
    let inputs: Vec<_> = [prompts, last.collect()].into_iter().chain(rest.iter().cloned()).collect();
    let found = evaluate(graph, &inputs).unwrap();
    let logits = found[0].chunks(config.vocabulary as usize);
    for (((sequence, length), logits), token) in sequences.iter().zip(lengths).zip(logits).zip(&found[1]) {
        let expected = reference.logits(&sequence[..length]).pop().unwrap();
        let greatest = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
        for (found, expected) in logits.iter().zip(&expected) {
            assert!((found - expected).abs() < tolerance * greatest, "{found}, not {expected}");
        }
        let most = expected.iter().copied().fold(f64::MIN, f64::max);
        assert!(expected[*token as usize] > most - tolerance * greatest, "{token} is not the likeliest");
    }
}

#[test]
fn a_model_is_one_graph() {
    // The definition takes what weights are rounded to, and rounds nothing else.
    for (element, tolerance) in [(Scalar::F32, 1e-5), (Scalar::F16, 1e-2), (Scalar::Bf16, 5e-2)] {
        let config = Config { element, ..CONFIG };
        let parameters = Parameters::of(&config);
        let masters = masters(&parameters, &config);
        let values = masters.iter().map(|x| f64::from(*x)).collect();
        let mut reference = Reference { config: &config, parameters: &parameters, values };
        let rounded = vm_kernels::graph::element(element);
        for parameter in parameters.all.iter().filter(|parameter| !parameter.is_norm()) {
            let of = &mut reference.values[parameter.offset as usize..][..parameter.len() as usize];
            of.iter_mut().for_each(|x| *x = rounded.round(*x));
        }
        let constant = next_token(&config, config.tokens, Weights::Constants(&masters)).unwrap();
        assert_eq!(constant.inputs.len(), 2);
        check(&config, &constant, &[], &reference, tolerance);
        let given = next_token(&config, config.tokens, Weights::Inputs).unwrap();
        assert_eq!(given.inputs.len(), 2 + parameters.all.len());
        assert_eq!(given.inputs[4].name, "h_0_attn_qkv_weight");
        let rest = parameters.all.iter().map(|parameter| {
            reference.values[parameter.offset as usize..][..parameter.len() as usize].to_vec()
        });
        check(&config, &given, &rest.collect::<Vec<_>>(), &reference, tolerance);
    }
}

#[test]
fn what_has_no_graph_says_why() {
    let no = |result: Result<ValidGraph, ExportError>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error} does not say {words}");
    };
    no(next_token(&CONFIG, CONFIG.tokens, Weights::Constants(&[0.0; 9])), "there are 9 masters");
    no(next_token(&CONFIG, CONFIG.tokens + 1, Weights::Inputs), "1 to 12 are possible");
    let layers = 100;
    no(next_token(&Config { layers, ..CONFIG }, 4, Weights::Inputs), "inputs");

    let mut memory = Memory::default();
    let [x, y] = ["x", "y"].map(|name| memory.array(name, Scalar::F32, &[8]));
    let doubled = |from: Part, to: Part, count: u64| {
        let mut steps = Steps::default();
        let chain = Chain::binary(Op::Add, Scalar::F32, Scalar::F32);
        steps.call(Elementwise::of(chain, count), [from, from, to]);
        steps
    };
    let given = [Port::new("x", x, &[8])];
    let made =
        |steps: &Steps, output: &Port| graph("g", &memory, steps, &given, &[], std::slice::from_ref(output));
    let all = Port::new("y", y, &[8]);
    // A part of what was given, and of what nobody wrote.
    let part = made(&doubled(x.at(2), y, 4), &Port::new("y", y, &[2, 2])).unwrap();
    let input: Vec<f64> = (0..8).map(f64::from).collect();
    assert_eq!(evaluate(&part, std::slice::from_ref(&input)).unwrap(), [[4.0, 6.0, 8.0, 10.0]]);
    assert_eq!(part.output_type(0), &vm_graph::TensorType::new(Element::F32, &[2, 2]));
    let zeros = made(&doubled(y, y, 8), &all).unwrap();
    assert_eq!(evaluate(&zeros, &[input]).unwrap(), [[0.0; 8]]);
    no(made(&doubled(x, y, 4), &all), "it reads 0..8 of y, which were not written as a whole");
    no(made(&doubled(x, x.at(2), 4), &all), "it writes a part of 0..8 of x");
    let few = [(Port::new("x", x, &[8]), vec![1.0; 7])];
    let all_of = std::slice::from_ref(&all);
    no(graph("g", &memory, &doubled(x, y, 8), &[], &few, all_of), "x: it has 8 elements, and is given 7");
    no(made(&doubled(x, y.at(6), 4), &all), "y0 ends behind y");
    no(made(&doubled(x, Part { array: 7, first: 0 }, 4), &all), "there is no array 7");
}
