//! What is done with a sum before it is stored.

use super::Gemm;
use super::schedule::Spot;
use vm_ir::Scalar;
use vm_ir::builder::{Builder, FragmentRef, PlaceRef, Val};
use vm_ir::types::Type;
use vm_ir::view::Access;

/// What is done with a sum before it is stored, in this order: it is scaled, C is added, then the bias, then comes the activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Is it multiplied by `alpha`?
    pub scaled: bool,
    /// How are the factors scaled?
    pub scales: Scales,
    /// Is `beta · C` added?
    pub plus: bool,
    /// Is `bias` added to each row?
    pub bias: bool,
    /// The function behind it.
    pub activation: Activation,
    /// What the function's gradient needs.
    pub aux: Auxiliary,
}

/// What a product and the gradient behind it have in common: `aux`, of C's extents and elements, which is what the activation took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Auxiliary {
    /// There is none.
    None,
    /// It is stored beside C.
    Store,
    /// The activation's derivative there is what the sum is multiplied by, and no function comes behind that.
    Gradient,
}

/// How factors are scaled: by f32s of which each is that of several elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// Not at all.
    None,
    /// Each row of A by one of `a_scale`, `[M]`, and each column of B by one of `b_scale`, `[N]`.
    Rows,
    /// Each 128 elements of a row of A by one of `a_scale`, `[⌈K / 128⌉, M]`, and each 128 × 128 of B by one of `b_scale`,
    /// `[⌈K / 128⌉, ⌈N / 128⌉]`. A tile has at most 128 columns, of which 128 are a multiple, and 128 of the inner dimension.
    Blocks,
}

/// A function of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x.
    None,
    /// max(x, 0).
    Relu,
    /// x / (1 + e^-x).
    Silu,
    /// x · Φ(x), Φ being the normal distribution's (Hendrycks and Gimpel, "Gaussian error linear units", 2016).
    Gelu,
}

impl Activation {
    fn of<'b>(self, x: Val<'b>) -> Val<'b> {
        match self {
            Activation::None => x,
            Activation::Relu => x.max(0.0),
            Activation::Silu => {
                let power = (-x).exp().fast();
                x * (power + 1.0).rcp().fast()
            }
            Activation::Gelu => x * normal_distribution(x)[0],
        }
    }

    /// Its derivative; at 0 that of [`Relu`](Activation::Relu) is 0.
    fn derivative<'b>(self, x: Val<'b>) -> Val<'b> {
        let k = x.builder();
        match self {
            Activation::None => k.f32(1.0),
            Activation::Relu => x.gt(0.0).select(k.f32(1.0), k.f32(0.0)),
            Activation::Silu => {
                let logistic = (k.f32(1.0) + (-x).exp().fast()).rcp().fast();
                logistic * x.fma(k.f32(1.0) - logistic, k.f32(1.0))
            }
            Activation::Gelu => {
                let [distribution, bell] = normal_distribution(x);
                // The density is the bell over √2π.
                (x * bell).fma(
                    std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2 / 2.0,
                    distribution,
                )
            }
        }
    }
}

/// Φ(x) to 10^-7, and its lower tail relative to that (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26): an
/// exponential, a reciprocal and few registers, beside which the sums of the largest tiles have room. Behind it that exponential, e^(-x² / 2).
fn normal_distribution(x: Val<'_>) -> [Val<'_>; 2] {
    let k = x.builder();
    let t = (x.abs() * (0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2) + 1.0).rcp().fast();
    let halves = [1.061_405_4f32, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6].map(|a| a / 2.0);
    let tail = halves[1..].iter().fold(k.constant(x.ty(), halves[0]), |sum, a| sum.fma(t, *a)) * t;
    let bell = (x * x * -0.5).exp().fast();
    let tail = tail * bell;
    [x.lt(0.0).select(tail, 1.0 - tail), bell]
}

impl Epilogue {
    /// The sum as it is.
    pub const NONE: Epilogue = Epilogue {
        scaled: false,
        scales: Scales::None,
        plus: false,
        bias: false,
        activation: Activation::None,
        aux: Auxiliary::None,
    };

    /// Does it load elements of C's extents?
    pub(super) fn loads(&self) -> bool {
        self.plus || self.aux == Auxiliary::Gradient
    }

    /// A letter for each of what it does, and the activation.
    pub(super) fn suffix(&self) -> String {
        let letters = [
            (self.scaled, 'a'),
            (self.scales == Scales::Rows, 's'),
            (self.scales == Scales::Blocks, 'k'),
            (self.plus, 'c'),
            (self.bias, 'b'),
        ];
        let letters: String = letters.iter().filter(|(has, _)| *has).map(|(_, letter)| *letter).collect();
        let activation = match self.activation {
            Activation::None => "",
            Activation::Relu => "_relu",
            Activation::Silu => "_silu",
            Activation::Gelu => "_gelu",
        };
        let letters = if letters.is_empty() { letters } else { format!("_{letters}") };
        let aux = match self.aux {
            Auxiliary::None => "",
            Auxiliary::Store => "_aux",
            Auxiliary::Gradient => "_gradient",
        };
        format!("{letters}{activation}{aux}")
    }

    /// Its parameters.
    pub(super) fn parameters<'b>(&self, k: Builder<'b>, gemm: &Gemm) -> Parameters<'b> {
        let alpha = self.scaled.then(|| k.scalar("alpha", Type::F32));
        let beta = self.plus.then(|| k.scalar("beta", Type::F32));
        let ranks = match self.scales {
            Scales::None => None,
            Scales::Rows => Some(1),
            Scales::Blocks => Some(2),
        };
        let scales = ranks
            .map(|rank| ["a_scale", "b_scale"].map(|name| k.view(name, Scalar::F32, rank, Access::Read)));
        let bias = self.bias.then(|| k.view("bias", gemm.output, 1, Access::Read));
        let access = match self.aux {
            Auxiliary::None => None,
            Auxiliary::Store => Some(Access::Write),
            Auxiliary::Gradient => Some(Access::Read),
        };
        let aux = access.map(|access| gemm.view(k, "aux", gemm.output, gemm.batch.of_rows(), access));
        Parameters { alpha, beta, scales, bias, aux }
    }
}

/// The parameters of an epilogue.
#[derive(Clone, Copy)]
pub(super) struct Parameters<'b> {
    alpha: Option<Val<'b>>,
    beta: Option<Val<'b>>,
    scales: Option<[PlaceRef<'b>; 2]>,
    bias: Option<PlaceRef<'b>>,
    aux: Option<PlaceRef<'b>>,
}

impl<'b> Parameters<'b> {
    /// What becomes of so many neighbouring sums, from a column on, where factors have no scales; `old` loads what C has.
    pub(super) fn of_values(
        self,
        gemm: &Gemm,
        sums: Val<'b>,
        old: impl FnOnce() -> Val<'b>,
        column: Val<'b>,
        lanes: u8,
    ) -> Val<'b> {
        let each = |number: Val<'b>| if lanes == 1 { number } else { number.splat(lanes) };
        let scaled = self.alpha.map_or(sums, |alpha| sums * each(alpha));
        let plus = self.beta.map_or(scaled, |beta| old().fma(each(beta), scaled));
        let biased = self.bias.map_or(plus, |bias| {
            let bias = bias.at([column]);
            plus + if lanes == 1 { bias.load() } else { bias.load_vector(lanes) }.to(Scalar::F32)
        });
        gemm.epilogue.activation.of(biased)
    }

    /// The epilogue of a kernel that sums up in `sum`, and stores `out`; `part` is what is summed up between two scales.
    pub(super) fn fragments(
        self,
        k: Builder<'b>,
        gemm: &Gemm,
        [sum, part, out]: [FragmentRef<'b>; 3],
    ) -> After<'b> {
        let [rows, columns] = gemm.own_dims();
        let of_a = self.scales.map(|_| k.column("a_scales", Scalar::F32, rows));
        let by_rows = gemm.epilogue.scales == Scales::Rows;
        let of_b = by_rows.then(|| k.row("b_scales", Scalar::F32, columns));
        let bias = self.bias.map(|_| k.row("bias_row", gemm.output, columns));
        let float = match (gemm.sum(), gemm.output) {
            (Scalar::I32, Scalar::I32) | (Scalar::F32, _) => sum,
            (_, Scalar::F32) => out,
            _ => k.fragment("scaled", Scalar::F32, [rows, columns]),
        };
        // What C had and what the activation took, in the place of what C is to have where that is another fragment.
        let old = match gemm.epilogue.loads() {
            true if out.place() == float.place() => Some(k.fragment("old", gemm.output, [rows, columns])),
            true => Some(out),
            false => None,
        };
        After { k, gemm: *gemm, parameters: self, sum, part, float, out, of_a, of_b, bias, old }
    }
}

/// An epilogue with its fragments.
pub(super) struct After<'b> {
    k: Builder<'b>,
    gemm: Gemm,
    parameters: Parameters<'b>,
    sum: FragmentRef<'b>,
    part: FragmentRef<'b>,
    /// The sum as f32.
    float: FragmentRef<'b>,
    out: FragmentRef<'b>,
    of_a: Option<FragmentRef<'b>>,
    of_b: Option<FragmentRef<'b>>,
    bias: Option<FragmentRef<'b>>,
    old: Option<FragmentRef<'b>>,
}

impl<'b> After<'b> {
    /// What comes behind the products of a part of the inner dimension.
    pub(super) fn step(&self, spot: &Spot<'b>, at: Val<'b>) {
        let (Scales::Blocks, Some([a, b]), Some(of_a)) =
            (self.gemm.epilogue.scales, self.parameters.scales, self.of_a)
        else {
            return;
        };
        let number = at / BLOCK;
        of_a.get(a, [number, spot.row]);
        let of_b = b.at([number, spot.column / BLOCK]).load();
        self.k.map([self.sum], [self.sum, self.part, of_a], |_, _, [sum, part, of_a]| {
            [part.fma(of_a * of_b, sum)]
        });
    }

    /// What is loaded before the products, so that nobody waits for it behind them: as far as there are registers for it meanwhile.
    pub(super) fn begin(&self, spot: &Spot<'b>) {
        if self.loads_early() {
            self.load_scales(spot);
            self.load_bias(spot);
        }
    }

    fn loads_early(&self) -> bool {
        let [_, columns] = self.gemm.own_dims();
        let words = |row: Option<_>, element: Scalar| row.map_or(0, |_| columns * element.bytes() / 16);
        let held = words(self.of_b, Scalar::F32) + words(self.bias, self.gemm.output);
        // Multicast takes some of them, and what C had others.
        self.gemm.cluster == 1
            && !self.gemm.epilogue.loads()
            && self.gemm.registers_of_sums() + held <= REGISTERS
    }

    fn load_scales(&self, spot: &Spot<'b>) {
        if let (Some([a, b]), Some(of_a), Some(of_b)) = (self.parameters.scales, self.of_a, self.of_b) {
            of_a.get(a, [spot.row]);
            of_b.get(b, [spot.column]);
        }
    }

    fn load_bias(&self, spot: &Spot<'b>) {
        if let (Some(view), Some(bias)) = (self.parameters.bias, self.bias) {
            bias.get(view, [spot.column]);
        }
    }

    /// What comes behind all products.
    pub(super) fn finish(&self, spot: &Spot<'b>, c: PlaceRef<'b>) {
        let (k, float, Epilogue { scales, activation, .. }) = (self.k, self.float, self.gemm.epilogue);
        let aux = self.parameters.aux;
        let late = !self.loads_early();
        if self.gemm.sum() == Scalar::I32 && self.gemm.output != Scalar::I32 {
            k.map([float], [self.sum], |_, _, [sum]| [sum.to(Scalar::F32)]);
        }
        if let Some(alpha) = self.parameters.alpha {
            k.map([float], [float], |_, _, [x]| [x * alpha]);
        }
        if late {
            self.load_scales(spot);
        }
        if let (Scales::Rows, Some(of_a), Some(of_b)) = (scales, self.of_a, self.of_b) {
            k.map([float], [float, of_a, of_b], |_, _, [x, of_a, of_b]| [x * (of_a * of_b)]);
        }
        if let (Some(beta), Some(old)) = (self.parameters.beta, self.old) {
            spot.get(old, c);
            k.map([float], [float, old], |_, _, [x, old]| [wide(old).fma(beta, x)]);
        }
        if late {
            self.load_bias(spot);
        }
        if let Some(bias) = self.bias {
            k.map([float], [float, bias], |_, _, [x, bias]| [x + wide(bias)]);
        }
        let same = self.out.place() == float.place();
        let narrow = |x: Val<'b>| if same { x } else { x.to(self.gemm.output) };
        let mut activation = activation;
        match (self.gemm.epilogue.aux, aux, self.old) {
            (Auxiliary::Store, Some(aux), _) => {
                if !same {
                    k.map([self.out], [float], |_, _, [x]| [narrow(x)]);
                }
                spot.put(self.out, aux);
            }
            (Auxiliary::Gradient, Some(aux), Some(old)) => {
                spot.get(old, aux);
                k.map([float], [float, old], |_, _, [x, old]| [x * activation.derivative(wide(old))]);
                activation = Activation::None;
            }
            _ => {}
        }
        if !same || activation != Activation::None {
            k.map([self.out], [float], |_, _, [x]| [narrow(activation.of(x))]);
        }
    }
}

/// Registers of a thread that what is held while products are added up may take.
const REGISTERS: u32 = 200;

/// Elements of the inner dimension, and columns, that have one scale.
const BLOCK: i32 = 128;

fn wide(x: Val<'_>) -> Val<'_> {
    if x.ty() == Type::F32 { x } else { x.to(Scalar::F32) }
}
