//! The sizes of a model, and the numbers of its training.

use vm_ir::Scalar;

/// Sizes and numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// What weights and activations are.
    pub element: Scalar,
    /// Blocks of attention and MLP.
    pub layers: u64,
    /// Elements of a token between the blocks.
    pub width: u64,
    /// Heads, each of `width / heads` elements: 64 or 128 where kernels run.
    pub heads: u64,
    /// Tokens of a sequence, at most.
    pub tokens: u64,
    /// Different tokens; a multiple of 8.
    pub vocabulary: u64,
    /// Sequences at a time.
    pub batch: u64,
    /// ε of layer norms.
    pub epsilon: f32,
    /// The norm to which gradients are clipped.
    pub clip: f32,
    /// The learning rate.
    pub lr: f64,
    /// β1 and β2 of AdamW.
    pub betas: [f64; 2],
    /// ε of AdamW.
    pub adam_epsilon: f64,
    /// What matrices decay by, times the learning rate. Vectors don't.
    pub weight_decay: f64,
}

impl Config {
    /// The small GPT-2, of 124 M parameters, with a vocabulary that is padded to a multiple of 128.
    pub const SMALL: Config = Config {
        element: Scalar::Bf16,
        layers: 12,
        width: 768,
        heads: 12,
        tokens: 1024,
        vocabulary: 50304,
        batch: 8,
        epsilon: 1e-5,
        clip: 1.0,
        lr: 6e-4,
        betas: [0.9, 0.95],
        adam_epsilon: 1e-8,
        weight_decay: 0.1,
    };

    /// One that a processor trains in no time.
    pub const TINY: Config = Config {
        layers: 2,
        width: 128,
        heads: 2,
        tokens: 20,
        vocabulary: 40,
        batch: 2,
        lr: 3e-3,
        ..Config::SMALL
    };

    /// Elements of a head.
    pub fn dim(&self) -> u64 {
        self.width / self.heads.max(1)
    }

    /// Tokens of all sequences.
    pub fn rows(&self) -> u64 {
        self.batch * self.tokens
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f32 {
        1.0 / (self.dim() as f32).sqrt()
    }

    /// Floating-point operations of a training step: products that are computed again don't count.
    pub fn operations(&self) -> f64 {
        let [layers, width, tokens, vocabulary] =
            [self.layers, self.width, self.tokens, self.vocabulary].map(|number| number as f64);
        let products = layers * 12.0 * width * width + vocabulary * width;
        // Half of the scores are masked.
        let attention = layers * tokens * width * 2.0 / 2.0;
        6.0 * self.rows() as f64 * (products + attention)
    }
}
