//! The steps of a prompt, and of each token behind it.
//!
//! Keys and values of all tokens are kept. A token's steps end with the next token and the lengths of the sequences, on the device, so that
//! they are recorded once and replayed for each token.

use vm_ir::Scalar;
use vm_kernels::append::{AdvanceLengths, Layout, QkvAppend};
use vm_kernels::attention::{DecodeAttention, SelfAttention};
use vm_kernels::elementwise::{Chain, Elementwise, Op};
use vm_kernels::gather::Embedding;
use vm_kernels::gemm::{Activation, Epilogue, Product};
use vm_kernels::sample::{Argmax, Logits};

use crate::config::Config;
use crate::parameters::{Affine, Parameters};
use crate::program::{Memory, Part, Steps};
use crate::train::{ALIGN, multiply, norm, product, with_positions};

/// What a model generates with.
#[derive(Debug)]
pub struct Generation {
    /// Arrays that are read and written from outside.
    pub arrays: GenerationArrays,
    /// From prompts that are all as long to the first token behind each.
    pub prompt: Steps,
    /// From a token of each sequence to the next. The lengths grow by 1.
    pub token: Steps,
}

/// Arrays of a generation.
#[derive(Clone, Copy, Debug)]
pub struct GenerationArrays {
    /// The prompts, i32 `[batch, prompt]`.
    pub prompts: Part,
    /// For each sequence the row of its last token among those of all prompts, i32 `[batch]`.
    pub last: Part,
    /// The newest token of each sequence, i32 `[batch]`.
    pub token: Part,
    /// Tokens of each sequence in the cache, i32 `[batch]`: those of the prompt before the first token's steps.
    pub lengths: Part,
    /// The same and one more.
    pub counts: Part,
    /// The logits of the newest token, bf16 `[batch, vocabulary]`.
    pub logits: Part,
}

/// The arrays of the steps over so many rows.
struct Rows {
    rows: u64,
    /// h and its successor, which take turns.
    h: [Part; 2],
    y: Part,
    qkv: Part,
    o: Part,
    up: Part,
    added: Part,
}

struct Writer<'a> {
    config: Config,
    parameters: &'a Parameters,
    weights: Part,
    masters: Part,
}

impl Generation {
    /// That of a model with these parameters, for prompts of so many tokens, whose arrays become part of `memory`.
    pub fn of(
        config: &Config,
        parameters: &Parameters,
        [weights, masters]: [Part; 2],
        prompt: u64,
        memory: &mut Memory,
    ) -> Generation {
        let Config { element, layers, width, vocabulary, batch, tokens: capacity, heads, .. } = *config;
        let writer = Writer { config: *config, parameters, weights, masters };
        let mut ints = |name: &str, count: u64| memory.array(name, Scalar::I32, &[count]);
        let prompts = ints("prompts", batch * prompt);
        let [last, token, lengths, counts, none] =
            ["last", "token", "lengths", "counts", "no lengths"].map(|name| ints(name, batch));
        let logits = memory.array("next logits", element, &[batch, vocabulary]);
        let arrays = GenerationArrays { prompts, last, token, lengths, counts, logits };
        let caches: Vec<[Part; 2]> = (0..layers)
            .map(|layer| {
                ["k", "v"]
                    .map(|of| memory.array(format!("h.{layer}.{of}"), element, &[batch, capacity, width]))
            })
            .collect();

        let of_prompt = Rows::of(memory, config, batch * prompt);
        let log_sums = memory.array("prompt log_sums", Scalar::F32, &[batch, heads, prompt]);
        let end = memory.array("prompt end", element, &[batch, width]);
        let mut steps = Steps::default();
        steps.call(
            writer.embedding(of_prompt.rows),
            [weights.at(parameters.tokens), prompts, of_prompt.added],
        );
        let add = with_positions(config, prompt * width);
        steps.call(add, [of_prompt.added, weights.at(parameters.positions), of_prompt.h[0]]);
        let attention = SelfAttention {
            element,
            batch,
            tokens: prompt,
            heads: [heads; 2],
            dim: config.dim() as u32,
            causal: true,
            scale: config.scale(),
        };
        let y = writer.blocks(&mut steps, &of_prompt, &mut |steps, layer| {
            let [k, v] = caches[layer];
            steps.call(writer.append(prompt), [of_prompt.qkv, k, v, none]);
            steps.call(attention, [of_prompt.qkv, of_prompt.o, log_sums]);
        });
        // Only the last token of each prompt has a next one to be found.
        let ends = Embedding { rows: of_prompt.rows, count: batch, ..writer.embedding(batch) };
        steps.call(ends, [y, last, end]);
        writer.next(&mut steps, end, &arrays);
        let of_prompts = steps;

        let of_token = Rows::of(memory, config, batch);
        let mut steps = Steps::default();
        let [tokens, positions] = [of_token.added, of_token.y];
        steps.call(writer.embedding(batch), [weights.at(parameters.tokens), token, tokens]);
        let position = Embedding { rows: capacity, ..writer.embedding(batch) };
        steps.call(position, [weights.at(parameters.positions), lengths, positions]);
        let add = Elementwise::of(Chain::binary(Op::Add, element, element), batch * width);
        steps.call(add, [tokens, positions, of_token.h[0]]);
        let attention = DecodeAttention {
            element,
            batch,
            heads: [heads; 2],
            dim: config.dim() as u32,
            layout: Layout::Contiguous { capacity },
            packed: true,
            scale: config.scale(),
        };
        let y = writer.blocks(&mut steps, &of_token, &mut |steps, layer| {
            let [k, v] = caches[layer];
            steps.call(writer.append(1), [of_token.qkv, k, v, lengths]);
            steps.call(attention, [of_token.qkv, k, v, counts, of_token.o]);
        });
        writer.next(&mut steps, y, &arrays);
        for lengths in [lengths, counts] {
            steps.call(AdvanceLengths { count: batch, by: 1 }, [lengths]);
        }
        Generation { arrays, prompt: of_prompts, token: steps }
    }
}

impl Rows {
    fn of(memory: &mut Memory, config: &Config, rows: u64) -> Rows {
        let mut matrix = |name: &str, columns: u64| {
            memory.array(format!("{name} of {rows} rows"), config.element, &[rows, columns])
        };
        let width = config.width;
        Rows {
            rows,
            h: ["h", "next h"].map(|name| matrix(name, width)),
            y: matrix("y", width),
            qkv: matrix("qkv", 3 * width),
            o: matrix("o", width),
            up: matrix("up", 4 * width),
            added: matrix("added", width),
        }
    }
}

impl Writer<'_> {
    fn embedding(&self, count: u64) -> Embedding {
        let Config { width, vocabulary, .. } = self.config;
        Embedding {
            rows: vocabulary,
            columns: width,
            count,
            element: self.config.element,
            index: Scalar::I32,
            align: ALIGN,
        }
    }

    fn append(&self, tokens: u64) -> QkvAppend {
        let Config { batch, heads, tokens: capacity, .. } = self.config;
        QkvAppend {
            batch,
            tokens,
            heads: [heads; 2],
            dim: self.config.dim(),
            capacity,
            element: self.config.element,
            align: ALIGN,
        }
    }

    /// All blocks behind the first h, and the last norm, whose result it gives. `attend` writes the steps of a layer's attention.
    fn blocks(&self, steps: &mut Steps, rows: &Rows, attend: &mut dyn FnMut(&mut Steps, usize)) -> Part {
        let width = self.config.width;
        let Rows { h: [mut h, mut next], y, qkv, o, up, added, .. } = *rows;
        let mut residual = false;
        let mut norm = |steps: &mut Steps, affine: Affine| {
            let function = norm(rows.rows, &self.config, residual, false);
            let [weight, bias] = [affine.weight, affine.bias].map(|offset| self.masters.at(offset));
            match residual {
                true => steps.call(function, [h, added, weight, bias, y, next]),
                false => steps.call(function, [h, weight, bias, y]),
            }
            if residual {
                (h, next) = (next, h);
            }
            residual = true;
        };
        for (layer, block) in self.parameters.blocks.iter().enumerate() {
            norm(steps, block.norm1);
            self.layer(steps, rows, block.qkv, [width, 3 * width], Activation::None, [y, qkv]);
            attend(steps, layer);
            self.layer(steps, rows, block.out, [width, width], Activation::None, [o, added]);
            norm(steps, block.norm2);
            self.layer(steps, rows, block.up, [width, 4 * width], Activation::Gelu, [y, up]);
            self.layer(steps, rows, block.down, [4 * width, width], Activation::None, [up, added]);
        }
        norm(steps, self.parameters.norm);
        y
    }

    /// y = f(x · weightᵀ + bias).
    fn layer(
        &self,
        steps: &mut Steps,
        rows: &Rows,
        affine: Affine,
        [inputs, outputs]: [u64; 2],
        activation: Activation,
        [x, y]: [Part; 2],
    ) {
        let epilogue = Epilogue { bias: true, activation, ..Epilogue::NONE };
        let product = Product { epilogue, ..product(&self.config, rows.rows, inputs, outputs) };
        let parts = [x, self.weights.at(affine.weight), y, self.weights.at(affine.bias)];
        steps.call(multiply(product), parts);
    }

    /// The logits of a row for each sequence, and the token with the greatest.
    fn next(&self, steps: &mut Steps, y: Part, arrays: &GenerationArrays) {
        let Config { width, vocabulary, batch, .. } = self.config;
        let embedding = self.weights.at(self.parameters.tokens);
        steps.call(multiply(product(&self.config, batch, width, vocabulary)), [y, embedding, arrays.logits]);
        let logits = Logits { element: self.config.element, rows: batch, columns: vocabulary, align: ALIGN };
        steps.call(Argmax { logits }, [arrays.logits, arrays.token]);
    }
}
