//! A product and attention of the kernel library, in the device's memory, compared with what this program computes itself.
//!
//! Inputs are small integers, so that all sums of a product are exact, and so are scores. Of attention the scale is ln 2, so that
//! weights are powers of two.

use vm_paravirt_guest::protocol::Argument;

use super::bench::timed;
use super::machine::Machine;
use super::{Numbers, Options, Outcome, Session, WRONG, tell, tell_log};
use crate::serial::{print, println};
use crate::sys;

/// A launch of the only kernel of a module of the library. Views are of bf16, of all of a buffer each; the last is the result.
struct Tile {
    name: &'static str,
    module: &'static [u8],
    grid: [u32; 3],
    arguments: &'static [Given],
}

/// What a parameter takes.
enum Given {
    /// A view of these extents in elements, and strides in bytes.
    View { extents: &'static [u64], strides: &'static [u64] },
    /// A number, by its bits.
    Number(u64),
}

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));

/// Numbers of the module and buffers.
const KERNELS: u32 = 1;
const HOST: u32 = 2;
const DEVICE: u32 = 3;
/// Bytes between views, and to whose multiples they are aligned.
const APART: u64 = 256;
/// What lies between views, and in the result before: NaN.
const CANARY: u16 = 0xffff;
/// The most launches that are timed.
const LAUNCHES: usize = 256;

/// Runs both.
pub(super) fn run(machine: Machine, options: &Options) -> bool {
    let mut session = match Session::open(machine) {
        Ok(session) => session,
        Err(error) => return tell("open", Err(error)),
    };
    let passed = tell(PRODUCT.name, product(&mut session, options.launches))
        && tell(ATTENTION.name, attention(&mut session, options.launches));
    if !passed {
        tell_log(&mut session);
    }
    passed
}

impl Tile {
    /// Each view's first element among those of a buffer that holds all, and how many it has.
    fn views(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.arguments.iter().filter_map(|given| match given {
            Given::View { extents, .. } => Some(extents.iter().product::<u64>()),
            Given::Number(_) => None,
        });
        counts.scan(APART / 2, |next, count| {
            let first = *next;
            *next = (first + count).next_multiple_of(APART / 2) + APART / 2;
            Some((first, count))
        })
    }

    /// What an element of the buffer holds before: an integer of an input, or the canary.
    fn before(&self, at: u64, inputs: &[Input]) -> u16 {
        let mut here = self.views().zip(inputs).filter_map(|((first, count), input)| {
            Some(bf16(input.at(at.checked_sub(first).filter(|element| *element < count)?)))
        });
        here.next().unwrap_or(CANARY)
    }

    /// Launches it once and then once for each of `took`, the times in cycles, and has what is in the buffer of all views then checked.
    /// Nothing but the result may have changed.
    fn launch(
        &self,
        session: &mut Session,
        inputs: &[Input],
        took: &mut [u64],
        check: impl FnOnce(&dyn Fn(u64) -> f32) -> Result<(), Wrong>,
    ) -> Outcome<Result<(), Wrong>> {
        let (first, results) = self.views().last().ok_or(WRONG)?;
        let words = (first + results + APART / 2).div_ceil(2);
        let (numbers, bytes) = (Numbers::new(words), 4 * words);
        let before = |at| self.before(at, inputs);
        numbers.fill(|word| u32::from(before(2 * word)) | u32::from(before(2 * word + 1)) << 16);
        session.run(|batch| {
            batch.create_module(KERNELS, self.module)?;
            batch.import_buffer(HOST, &[numbers.range()])?;
            batch.create_buffer(DEVICE, bytes)?;
            batch.copy((DEVICE, 0), (HOST, 0), bytes)?;
            batch.fence()
        })?;
        let (mut views, mut arguments) = (self.views(), [Argument::Scalar(0); 8]);
        let arguments = arguments.get_mut(..self.arguments.len()).ok_or(WRONG)?;
        for (argument, given) in arguments.iter_mut().zip(self.arguments) {
            *argument = match given {
                Given::Number(bits) => Argument::Scalar(*bits),
                Given::View { extents, strides } => {
                    let (first, _) = views.next().ok_or(WRONG)?;
                    Argument::strided(DEVICE, 2 * first, extents, strides)?
                }
            };
        }
        let mut launch = || {
            timed(session, |batch| {
                batch.launch(KERNELS, 0, self.grid, arguments)?;
                batch.fence()
            })
        };
        launch()?;
        took.iter_mut().try_for_each(|took| launch().map(|cycles| *took = cycles))?;
        session.run(|batch| {
            batch.copy((HOST, 0), (DEVICE, 0), bytes)?;
            batch.fence()?;
            batch.destroy_buffer(DEVICE)?;
            batch.destroy_buffer(HOST)?;
            batch.destroy_module(KERNELS)
        })?;
        let element = |at| (sys::read32(numbers.address + 4 * (at / 2)) >> (16 * (at % 2))) as u16;
        for at in (0..2 * words).filter(|at| !(first..first + results).contains(at)) {
            if element(at) != before(at) {
                let [found, expected] = [element(at), before(at)].map(|bits| value(bits).into());
                return Ok(Err(Wrong { place: [0, 0, at], of: "the buffer of all", found, expected }));
            }
        }
        Ok(check(&|at| value(element(first + at))))
    }

    /// The same, in user mode: some KVMs emulate the kernel mode of guests that were not made for them. Prints what came out.
    fn run(
        &self,
        session: &mut Session,
        inputs: &[Input],
        launches: u64,
        check: impl FnOnce(&dyn Fn(u64) -> f32) -> Result<(), Wrong>,
    ) -> Outcome {
        let mut took = [0; LAUNCHES];
        let took = took.get_mut(..launches as usize).ok_or(WRONG)?;
        let checked = sys::in_user_mode(|| self.launch(session, inputs, took, check))?;
        print!("bare: samples {}", self.name);
        let machine = session.accelerator.platform();
        took.iter().for_each(|cycles| print!(" {}", machine.nanoseconds(*cycles)));
        println!();
        checked.map_err(|Wrong { place, of, found, expected }| {
            println!("bare: {}: element {place:?} of {of} is {found}, not {expected}", self.name);
            WRONG
        })
    }
}

/// An element that is not what it should be.
struct Wrong {
    place: [u64; 3],
    of: &'static str,
    found: f64,
    expected: f64,
}

/// The integers of an input.
#[derive(Clone, Copy)]
struct Input {
    /// Which input it is.
    number: u64,
    /// The greatest magnitude.
    greatest: i64,
    /// How many times more numbers are drawn from; those of a magnitude above the greatest are 0.
    thinned: i64,
}

impl Input {
    fn at(self, element: u64) -> i64 {
        let mixed = (element ^ self.number << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let drawn = self.greatest * self.thinned;
        let integer = (mixed >> 40) as i64 % (2 * drawn + 1) - drawn;
        if integer.abs() <= self.greatest { integer } else { 0 }
    }
}

/// Every element of C is the rounded sum.
fn product(session: &mut Session, launches: u64) -> Outcome {
    const A: Input = Input { number: 0, greatest: 4, thinned: 1 };
    const B: Input = Input { number: 1, ..A };
    let &[Given::View { extents: &[_, k], .. }, _, Given::View { extents: &[m, n], .. }] = PRODUCT.arguments
    else {
        return Err(WRONG);
    };
    PRODUCT.run(session, &[A, B], launches, |c| {
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let sum = (0..k).map(|i| A.at(row * k + i) * B.at(i * n + column)).sum();
            let (found, expected) = (c(at).into(), value(bf16(sum)).into());
            if found != expected {
                return Err(Wrong { place: [0, row, column], of: "C", found, expected });
            }
        }
        Ok(())
    })
}

/// Every element of O is the weighted mean of the values of the keys that its query sees, those up to its own: rounded to bf16, and off by
/// what sums of f32 and powers of two may be. All heads share one of keys. Weights are integers, parts of 2^-40.
fn attention(session: &mut Session, launches: u64) -> Outcome {
    // Of the mean; and of what it would be without the values' signs.
    const ROUNDED: f64 = 1.0 / 256.0;
    const OFF: f64 = 1.0 / 65_536.0;
    // Few are not zero, so that scores lie near each other.
    const Q: Input = Input { number: 0, greatest: 1, thinned: 16 };
    const K: Input = Input { number: 1, greatest: 1, thinned: 1 };
    const V: Input = Input { number: 2, greatest: 8, thinned: 1 };
    const TOKENS: usize = match ATTENTION.arguments[0] {
        Given::View { extents, .. } => extents[2] as usize,
        Given::Number(_) => 0,
    };
    let &[Given::View { extents: &[1, heads, _, dim], .. }, .., Given::Number(scale)] = ATTENTION.arguments
    else {
        return Err(WRONG);
    };
    if scale as u32 != core::f32::consts::LN_2.to_bits() {
        return Err(WRONG);
    }
    ATTENTION.run(session, &[Q, K, V], launches, |o| {
        let mut scores = [0; TOKENS];
        for row in 0..heads * TOKENS as u64 {
            let (place, head) = (row / heads, row % heads);
            let scores = &mut scores[..=place as usize];
            for (score, key) in scores.iter_mut().zip(0..) {
                *score =
                    (0..dim).map(|column| Q.at(row * dim + column) * K.at(key * dim + column)).sum::<i64>();
            }
            let greatest = scores.iter().fold(i64::MIN, |greatest, score| greatest.max(*score));
            scores.iter_mut().for_each(|score| *score = 1 << 40 >> (greatest - *score).min(62));
            let total = scores.iter().sum::<i64>() as f64;
            for column in 0..dim {
                let terms = scores.iter().zip(0..).map(|(weight, key)| weight * V.at(key * dim + column));
                let (sum, size) = terms.fold((0, 0), |(sum, size), term| (sum + term, size + term.abs()));
                let (found, expected) = (f64::from(o(row * dim + column)), sum as f64 / total);
                let close = (found - expected).abs() <= ROUNDED * expected.abs() + OFF * size as f64 / total;
                if !close {
                    return Err(Wrong { place: [place, head, column], of: "O", found, expected });
                }
            }
        }
        Ok(())
    })
}

/// An integer as bf16, rounded to the nearest.
fn bf16(integer: i64) -> u16 {
    let bits = (integer as f32).to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// A number of bf16.
fn value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
