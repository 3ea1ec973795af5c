//! Which parameters a model has, and where each lies among all.
//!
//! All lie one behind the other in one array, so that one launch updates them: first the matrices, which decay, then the vectors. The
//! same places hold for masters, gradients and moments.

use crate::config::Config;

/// Elements to whose multiples each begins.
const ALIGN: u64 = 64;

/// A parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, as in GPT-2: `h.0.attn.qkv.weight`.
    pub name: String,
    /// Its extents; of a layer's weight `[outputs, inputs]`.
    pub extents: Vec<u64>,
    /// Where it begins among all, in elements.
    pub offset: u64,
}

impl Parameter {
    /// Its elements.
    pub fn len(&self) -> u64 {
        self.extents.iter().product()
    }

    /// Has it none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Is it a norm's? Those are taken as masters, in f32.
    pub fn is_norm(&self) -> bool {
        self.name.contains("ln_")
    }
}

/// A weight and a bias: where each begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine {
    /// The weight.
    pub weight: u64,
    /// The bias.
    pub bias: u64,
}

/// The parameters of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The norm before attention.
    pub norm1: Affine,
    /// Queries, keys and values.
    pub qkv: Affine,
    /// What comes behind attention.
    pub out: Affine,
    /// The norm before the MLP.
    pub norm2: Affine,
    /// The MLP's first layer.
    pub up: Affine,
    /// Its second.
    pub down: Affine,
}

/// The parameters of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// All, in their order.
    pub all: Vec<Parameter>,
    /// Elements of the matrices, which come first, and of the vectors; with gaps, which stay zero.
    pub sizes: [u64; 2],
    /// The embedding of tokens, which is the last layer's weight too.
    pub tokens: u64,
    /// The embedding of positions.
    pub positions: u64,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// The last norm.
    pub norm: Affine,
}

impl Parameters {
    /// Those of a model.
    pub fn of(config: &Config) -> Parameters {
        let Config { layers, width, tokens, vocabulary, .. } = *config;
        let mut all: Vec<Parameter> = Vec::new();
        let mut end = 0;
        let mut place = |name: String, extents: &[u64]| {
            let parameter = Parameter { name, extents: extents.to_vec(), offset: end };
            end = (end + parameter.len()).next_multiple_of(ALIGN);
            all.push(parameter);
            all.last().map_or(0, |parameter| parameter.offset)
        };
        let embeddings =
            [place("wte.weight".into(), &[vocabulary, width]), place("wpe.weight".into(), &[tokens, width])];
        let layer = |number: u64, name: &str| format!("h.{number}.{name}");
        let matrices: Vec<[u64; 4]> = (0..layers)
            .map(|number| {
                [
                    place(layer(number, "attn.qkv.weight"), &[3 * width, width]),
                    place(layer(number, "attn.out.weight"), &[width, width]),
                    place(layer(number, "mlp.up.weight"), &[4 * width, width]),
                    place(layer(number, "mlp.down.weight"), &[width, 4 * width]),
                ]
            })
            .collect();
        let matrices_end = place("".into(), &[0]);
        let mut vector = |name: String, count: u64| place(name, &[count]);
        let mut blocks = Vec::new();
        for (number, weights) in (0..).zip(matrices) {
            let mut norm = |name: &str| Affine {
                weight: vector(layer(number, &format!("{name}.weight")), width),
                bias: vector(layer(number, &format!("{name}.bias")), width),
            };
            let [norm1, norm2] = [norm("ln_1"), norm("ln_2")];
            let mut with = |weight, name: &str, count| Affine {
                weight,
                bias: vector(layer(number, &format!("{name}.bias")), count),
            };
            let [qkv, out, up, down] = weights;
            blocks.push(Block {
                norm1,
                qkv: with(qkv, "attn.qkv", 3 * width),
                out: with(out, "attn.out", width),
                norm2,
                up: with(up, "mlp.up", 4 * width),
                down: with(down, "mlp.down", width),
            });
        }
        let norm =
            Affine { weight: vector("ln_f.weight".into(), width), bias: vector("ln_f.bias".into(), width) };
        all.retain(|parameter| !parameter.is_empty());
        let [of_tokens, positions] = embeddings;
        let sizes = [matrices_end, end - matrices_end];
        Parameters { all, sizes, tokens: of_tokens, positions, blocks, norm }
    }

    /// Elements of all, with gaps.
    pub fn len(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What training begins with, by their places: norms are 1, biases 0, and weights and embeddings random with a deviation of 0.02, which that of layers
    /// behind which a residual is added is divided by √(2 · layers) of, as GPT-2's are. Random numbers are the same everywhere.
    pub fn initial(&self, config: &Config, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0f32; self.len() as usize];
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
        };
        for parameter in &self.all {
            let of = &mut values[parameter.offset as usize..][..parameter.len() as usize];
            if parameter.extents.len() > 1 {
                let residual =
                    parameter.name.ends_with("out.weight") || parameter.name.ends_with("down.weight");
                let deviation = 0.02 / if residual { (2.0 * config.layers as f32).sqrt() } else { 1.0 };
                // The sum of four uniform numbers is near to a normal one.
                of.fill_with(|| (0..4).map(|_| uniform()).sum::<f32>() * deviation * 3f32.sqrt());
            } else if parameter.is_norm() && parameter.name.ends_with("weight") {
                of.fill(1.0);
            }
        }
        values
    }
}
