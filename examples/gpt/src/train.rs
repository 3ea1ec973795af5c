//! The steps of the loss, its gradients and AdamW.
//!
//! ```text
//! h = embedding + positions
//! each block:  h += out(attention(qkv(norm1(h))));  h += down(gelu(up(norm2(h))))
//! loss = cross-entropy(norm(h) · embeddingᵀ)
//! ```
//!
//! A norm adds what the layer before it gave to h and keeps the sum, so that h is read and written once for both. The gradient of logits takes
//! their place; probabilities are never written.

use vm_ir::Scalar;
use vm_kernels::attention::{SelfAttention, SelfAttentionBackward};
use vm_kernels::columns::ColumnSums;
use vm_kernels::elementwise::{Along, Chain, Elementwise, Op};
use vm_kernels::flat::{AdamW, GradNorm};
use vm_kernels::gather::Embedding;
use vm_kernels::gemm::{Activation, Auxiliary, Epilogue, Multiply, Product};
use vm_kernels::loss::{CrossEntropy, CrossEntropyBackward, LossOptions};
use vm_kernels::norm::{Norm, NormBackward, NormForward};
use vm_kernels::scatter::{EmbeddingGradient, ScatterAdd};

use crate::config::Config;
use crate::parameters::{Affine, Parameters};
use crate::program::{Memory, Part, Steps};

/// What every array is aligned to, in bytes.
pub(crate) const ALIGN: u32 = 16;

/// What a model is trained with: arrays, and steps over them.
#[derive(Debug)]
pub struct Training {
    /// Its sizes.
    pub config: Config,
    /// Its parameters.
    pub parameters: Parameters,
    /// All arrays.
    pub memory: Memory,
    /// Those that are read and written from outside.
    pub arrays: Arrays,
    /// Forward and backward: from the tokens to the loss, the gradients, their norm and their scale.
    pub gradients: Steps,
}

/// Arrays of a training.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    /// Tokens, i32 `[batch, tokens]`.
    pub tokens: Part,
    /// The token that is to follow each, i32 `[batch, tokens]`.
    pub targets: Part,
    /// The loss, f32 `[1]`.
    pub loss: Part,
    /// What the loss is multiplied by for the gradients, f32 `[1]`: 1 as a rule. It is zero at first.
    pub dloss: Part,
    /// The norm of all gradients, f32 `[1]`.
    pub norm: Part,
    /// What clips them, f32 `[1]`.
    pub clip: Part,
    /// All parameters, as they are multiplied.
    pub weights: Part,
    /// The same in f32.
    pub masters: Part,
    /// Their gradients, f32.
    pub gradients: Part,
    /// AdamW's moments, f32.
    pub moments: [Part; 2],
}

/// What a norm keeps for its gradient.
#[derive(Clone, Copy)]
struct Normed {
    /// The sum that was normalised.
    h: Part,
    y: Part,
    mean: Part,
    rstd: Part,
}

/// What a block keeps for its gradient.
#[derive(Clone, Copy)]
struct Kept {
    norm1: Normed,
    qkv: Part,
    /// What attention gives, and the logarithms of its sums.
    o: Part,
    log_sums: Part,
    norm2: Normed,
    /// What the MLP's activation takes, and what it gives.
    up: Part,
    gelu: Part,
}

/// A layer: its parameters, and how many inputs and outputs it has.
#[derive(Clone, Copy)]
struct Layer {
    affine: Affine,
    inputs: u64,
    outputs: u64,
}

impl Training {
    /// That of a model.
    pub fn of(config: &Config) -> Training {
        let parameters = Parameters::of(config);
        let mut memory = Memory::default();
        let (rows, all) = (config.rows(), parameters.len());
        let arrays = Arrays {
            tokens: memory.array("tokens", Scalar::I32, &[rows]),
            targets: memory.array("targets", Scalar::I32, &[rows]),
            loss: memory.array("loss", Scalar::F32, &[1]),
            dloss: memory.array("dloss", Scalar::F32, &[1]),
            norm: memory.array("norm", Scalar::F32, &[1]),
            clip: memory.array("clip", Scalar::F32, &[1]),
            weights: memory.array("weights", config.element, &[all]),
            masters: memory.array("masters", Scalar::F32, &[all]),
            gradients: memory.array("gradients", Scalar::F32, &[all]),
            moments: ["m", "v"].map(|name| memory.array(name, Scalar::F32, &[all])),
        };
        let mut writer =
            Writer { config: *config, parameters: &parameters, arrays, memory, steps: Steps::default() };
        writer.write();
        let Writer { memory, steps, .. } = writer;
        Training { config: *config, parameters, memory, arrays, gradients: steps }
    }

    /// AdamW with the gradients of before, clipped; steps are counted from 1.
    pub fn update(&self, step: u32) -> Steps {
        let Config { lr, betas: [beta1, beta2], adam_epsilon, weight_decay, .. } = self.config;
        let Arrays { weights, masters, gradients, moments: [m, v], clip, .. } = self.arrays;
        let [matrices, vectors] = self.parameters.sizes;
        let mut steps = Steps::default();
        for (first, size, weight_decay) in [(0, matrices, weight_decay), (matrices, vectors, 0.0)] {
            let function = AdamW {
                sizes: vec![size],
                parameter: self.config.element,
                gradient: Scalar::F32,
                master: true,
                scaled: true,
                align: ALIGN,
                lr,
                beta1,
                beta2,
                eps: adam_epsilon,
                weight_decay,
                step,
            };
            let of = [weights, masters, gradients, m, v].map(|part| part.at(first));
            steps.call(function, [&of[..], &[clip]].concat());
        }
        steps
    }
}

/// A layer's product: C = A · Bᵀ + bias, of `[rows, inputs]` and `[outputs, inputs]`.
pub(crate) fn product(config: &Config, rows: u64, inputs: u64, outputs: u64) -> Product {
    Product { b_transposed: true, ..plain(config, rows, outputs, inputs) }
}

/// A product of plain matrices.
fn plain(config: &Config, m: u64, n: u64, k: u64) -> Product {
    Product { element: config.element, output: config.element, ..Product::of(m, n, k) }
}

/// A product without numbers.
pub(crate) fn multiply(product: Product) -> Multiply {
    Multiply { product, alpha: 1.0, beta: 0.0 }
}

/// What writes the steps.
struct Writer<'a> {
    config: Config,
    parameters: &'a Parameters,
    arrays: Arrays,
    memory: Memory,
    steps: Steps,
}

impl Writer<'_> {
    fn write(&mut self) {
        let Config { layers, width, vocabulary, batch, tokens, .. } = self.config;
        let rows = self.config.rows();
        let Parameters { blocks, norm, positions, tokens: embedding, .. } = self.parameters;
        let Arrays { tokens: of_tokens, targets, loss, dloss, weights, gradients, .. } = self.arrays;
        let (embedding, positions) = (*embedding, *positions);

        // Forward.
        let embedded = self.matrix("embedded", width);
        let first = self.matrix("h", width);
        let gather = Embedding {
            rows: vocabulary,
            columns: width,
            count: rows,
            element: self.config.element,
            index: Scalar::I32,
            align: ALIGN,
        };
        self.steps.call(gather, [weights.at(embedding), of_tokens, embedded]);
        let add = with_positions(&self.config, tokens * width);
        self.steps.call(add, [embedded, weights.at(positions), first]);
        let mut kept: Vec<Kept> = Vec::new();
        let mut before = (first, None);
        for number in 0..layers {
            let (block, after) = self.block(number, before);
            before = (block.norm2.h, Some(after));
            kept.push(block);
        }
        let last = self.norm("ln_f", *norm, before);
        let logits = self.matrix("logits", vocabulary);
        self.steps.call(
            multiply(product(&self.config, rows, width, vocabulary)),
            [last.y, weights.at(embedding), logits],
        );
        let log_sums = self.memory.array("log_sums", Scalar::F32, &[rows]);
        let options = LossOptions::default();
        let entropy = CrossEntropy {
            rows,
            columns: vocabulary,
            element: self.config.element,
            target: Scalar::I32,
            options,
            log_probs: None,
            log_sums: true,
            align: ALIGN,
        };
        self.steps.call(entropy, [logits, targets, loss, log_sums]);

        // Backward.
        let entropy = CrossEntropyBackward {
            rows,
            columns: vocabulary,
            element: self.config.element,
            target: Scalar::I32,
            options,
            in_place: true,
            log_sums: true,
            align: ALIGN,
        };
        self.steps.call(entropy, [logits, targets, dloss, log_sums]);
        // Gradients of a matrix as wide as h, which take turns.
        let [mut d, mut other, dy] = ["dh", "dh of before", "dy"].map(|name| self.matrix(name, width));
        let [of_qkv, of_up] = [("dqkv", 3), ("dup", 4)].map(|(name, times)| self.matrix(name, times * width));
        let of_logits =
            Layer { affine: Affine { weight: embedding, bias: 0 }, inputs: width, outputs: vocabulary };
        self.products_backward(of_logits, logits, (last.y, None), dy);
        self.norm_backward(*norm, last, dy, None, d);
        for (block, kept) in blocks.iter().zip(&kept).rev() {
            let down = Layer { affine: block.down, inputs: 4 * width, outputs: width };
            self.backward(down, d, (kept.gelu, Some(kept.up)), of_up);
            let up = Layer { affine: block.up, inputs: width, outputs: 4 * width };
            self.backward(up, of_up, (kept.norm2.y, None), dy);
            self.norm_backward(block.norm2, kept.norm2, dy, Some(d), other);
            (d, other) = (other, d);
            let out = Layer { affine: block.out, inputs: width, outputs: width };
            self.backward(out, d, (kept.o, None), dy);
            let attention = SelfAttentionBackward(self.attention());
            self.steps.call(attention, [kept.qkv, kept.o, kept.log_sums, dy, of_qkv]);
            let qkv = Layer { affine: block.qkv, inputs: width, outputs: 3 * width };
            self.backward(qkv, of_qkv, (kept.norm1.y, None), dy);
            self.norm_backward(block.norm1, kept.norm1, dy, Some(d), other);
            (d, other) = (other, d);
        }
        let sums = ColumnSums {
            rows: batch,
            columns: tokens * width,
            element: self.config.element,
            output: Scalar::F32,
            align: ALIGN,
        };
        self.steps.call(sums, [d, gradients.at(positions)]);
        // To what the last layer has given.
        let add = ScatterAdd {
            rows: vocabulary,
            columns: width,
            count: rows,
            element: self.config.element,
            index: Scalar::I32,
            output: Scalar::F32,
            deterministic: false,
            align: ALIGN,
        };
        let scatter = EmbeddingGradient { add, accumulate: true };
        self.steps.call(scatter, [d, of_tokens, gradients.at(embedding)]);
        let norm = GradNorm {
            sizes: vec![self.parameters.len()],
            element: Scalar::F32,
            align: ALIGN,
            clip: Some(self.config.clip),
        };
        self.steps.call(norm, [gradients, self.arrays.norm, self.arrays.clip]);
    }

    /// An array of a row for each token.
    fn matrix(&mut self, name: impl Into<String>, columns: u64) -> Part {
        self.memory.array(name, self.config.element, &[self.config.rows(), columns])
    }

    fn attention(&self) -> SelfAttention {
        let Config { heads, batch, tokens, .. } = self.config;
        SelfAttention {
            element: self.config.element,
            batch,
            tokens,
            heads: [heads; 2],
            dim: self.config.dim() as u32,
            causal: true,
            scale: self.config.scale(),
        }
    }

    /// A block behind h and what is to be added to it; gives what it keeps, and what is to be added to its last h.
    fn block(&mut self, number: u64, before: (Part, Option<Part>)) -> (Kept, Part) {
        let Config { width, heads, batch, tokens, .. } = self.config;
        let block = self.parameters.blocks[number as usize];
        let name = |what: &str| format!("h.{number}.{what}");
        let norm1 = self.norm(&name("ln_1"), block.norm1, before);
        let qkv = self.matrix(name("qkv"), 3 * width);
        self.forward(Layer { affine: block.qkv, inputs: width, outputs: 3 * width }, norm1.y, qkv);
        let o = self.matrix(name("o"), width);
        let log_sums = self.memory.array(name("log_sums"), Scalar::F32, &[batch, heads, tokens]);
        self.steps.call(self.attention(), [qkv, o, log_sums]);
        let out = self.matrix(name("out"), width);
        self.forward(Layer { affine: block.out, inputs: width, outputs: width }, o, out);
        let norm2 = self.norm(&name("ln_2"), block.norm2, (norm1.h, Some(out)));
        let up = self.matrix(name("up"), 4 * width);
        let gelu = self.matrix(name("gelu"), 4 * width);
        let layer = Layer { affine: block.up, inputs: width, outputs: 4 * width };
        self.forward_to(layer, norm2.y, Some(up), gelu);
        let down = self.matrix(name("down"), width);
        self.forward(Layer { affine: block.down, inputs: 4 * width, outputs: width }, gelu, down);
        (Kept { norm1, qkv, o, log_sums, norm2, up, gelu }, down)
    }

    /// Adds to h what there is to add, and normalises the sum.
    fn norm(&mut self, name: &str, affine: Affine, (h, added): (Part, Option<Part>)) -> Normed {
        let (rows, width) = (self.config.rows(), self.config.width);
        let y = self.matrix(format!("{name}.y"), width);
        let [mean, rstd] =
            ["mean", "rstd"].map(|of| self.memory.array(format!("{name}.{of}"), Scalar::F32, &[rows]));
        let function = norm(rows, &self.config, added.is_some(), true);
        let [weight, bias] = [affine.weight, affine.bias].map(|offset| self.arrays.masters.at(offset));
        let sum = added.map(|_| self.matrix(format!("{name}.h"), width));
        let parts = [Some(h), added, Some(weight), Some(bias), Some(y), sum, Some(mean), Some(rstd)];
        self.steps.call(function, parts.into_iter().flatten().collect::<Vec<_>>());
        Normed { h: sum.unwrap_or(h), y, mean, rstd }
    }

    /// The gradients of a norm: of h, to which `added` comes, and of its parameters.
    fn norm_backward(&mut self, affine: Affine, normed: Normed, dy: Part, added: Option<Part>, dh: Part) {
        let Normed { h, mean, rstd, .. } = normed;
        let function = NormBackward {
            norm: Norm::Layer,
            rows: self.config.rows(),
            columns: self.config.width,
            element: self.config.element,
            weight: Scalar::F32,
            residual: added.is_some(),
            bias: true,
            align: ALIGN,
        };
        let Arrays { masters, gradients, .. } = self.arrays;
        let parts = [
            Some(h),
            Some(masters.at(affine.weight)),
            Some(dy),
            added,
            Some(mean),
            Some(rstd),
            Some(dh),
            Some(gradients.at(affine.weight)),
            Some(gradients.at(affine.bias)),
        ];
        self.steps.call(function, parts.into_iter().flatten().collect::<Vec<_>>());
    }

    /// y = x · weightᵀ + bias.
    fn forward(&mut self, layer: Layer, x: Part, y: Part) {
        self.forward_to(layer, x, None, y);
    }

    /// The same, or with `taken` that, and y = gelu(taken).
    fn forward_to(&mut self, layer: Layer, x: Part, taken: Option<Part>, y: Part) {
        let Layer { affine, inputs, outputs } = layer;
        let product = product(&self.config, self.config.rows(), inputs, outputs);
        let (activation, aux) = match taken {
            Some(_) => (Activation::Gelu, Auxiliary::Store),
            None => (Activation::None, Auxiliary::None),
        };
        let epilogue = Epilogue { bias: true, activation, aux, ..Epilogue::NONE };
        let weights = self.arrays.weights;
        let parts = [Some(x), Some(weights.at(affine.weight)), Some(y), Some(weights.at(affine.bias)), taken];
        let parts: Vec<Part> = parts.into_iter().flatten().collect();
        self.steps.call(multiply(Product { epilogue, ..product }), parts);
    }

    /// The gradients of a layer from that of y: of x, of its weight and of its bias. Where x is gelu of something, dx is the gradient of that.
    fn backward(&mut self, layer: Layer, dy: Part, x: (Part, Option<Part>), dx: Part) {
        self.products_backward(layer, dy, x, dx);
        let sums = ColumnSums {
            rows: self.config.rows(),
            columns: layer.outputs,
            element: self.config.element,
            output: Scalar::F32,
            align: ALIGN,
        };
        self.steps.call(sums, [dy, self.arrays.gradients.at(layer.affine.bias)]);
    }

    /// dx = dy · weight, and dweight = dyᵀ · x.
    fn products_backward(&mut self, layer: Layer, dy: Part, (x, taken): (Part, Option<Part>), dx: Part) {
        let Layer { affine, inputs, outputs } = layer;
        let rows = self.config.rows();
        let Arrays { weights, gradients, .. } = self.arrays;
        let epilogue = match taken {
            Some(_) => Epilogue { activation: Activation::Gelu, aux: Auxiliary::Gradient, ..Epilogue::NONE },
            None => Epilogue::NONE,
        };
        let of_x = Product { epilogue, ..plain(&self.config, rows, inputs, outputs) };
        let parts = [Some(dy), Some(weights.at(affine.weight)), Some(dx), taken];
        self.steps.call(multiply(of_x), parts.into_iter().flatten().collect::<Vec<_>>());
        let of_weight =
            Product { a_transposed: true, output: Scalar::F32, ..plain(&self.config, outputs, inputs, rows) };
        self.steps.call(multiply(of_weight), [dy, x, gradients.at(affine.weight)]);
    }
}

/// A layer norm of rows, with what its gradient needs or without.
pub(crate) fn norm(rows: u64, config: &Config, residual: bool, statistics: bool) -> NormForward {
    NormForward {
        weight: Scalar::F32,
        residual,
        bias: true,
        statistics,
        ..NormForward::of(Norm::Layer, rows, config.width, config.element, config.epsilon)
    }
}

/// The sum of embedded tokens, a row for each sequence, and of what is the same for each of them.
pub(crate) fn with_positions(config: &Config, columns: u64) -> Elementwise {
    let Config { element, batch, .. } = *config;
    let mut chain = Chain::new();
    let tokens = chain.input(element, Along::All);
    let positions = chain.input(element, Along::Columns);
    let sum = chain.step(Op::Add, tokens, positions);
    chain.output(sum, element);
    Elementwise { chain, rows: batch, columns, numbers: [0.0; 4], align: ALIGN }
}
