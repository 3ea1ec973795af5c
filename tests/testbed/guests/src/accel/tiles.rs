//! A product and attention of the kernel library, in the device's memory, compared with what this program computes itself.
//!
//! Inputs are small integers, so that all of a product's sums are exact, and scores are.

use vm_paravirt_guest::protocol::Argument;

use super::bench::timed;
use super::machine::Machine;
use super::{Numbers, Options, Outcome, Session, WRONG, tell, tell_log};
use crate::serial::{print, println};
use crate::sys;

/// A launch of the only kernel of a module of the library. Views are of bf16; the last is the result.
struct Tile {
    name: &'static str,
    module: &'static [u8],
    grid: [u32; 3],
    arguments: &'static [Given],
}

/// What a parameter takes.
enum Given {
    /// A view of these extents.
    View(&'static [u64]),
    /// A number, by its bits.
    Number(u64),
}

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));

/// How far an element of attention may be off, as a part of what its values come to without their signs: weights are rounded to bf16
/// before they are multiplied, and so is the result, each by up to 2^-8; a quarter more is for sums of f32 and powers of two.
const TOLERANCE: f64 = 1.25 / 128.0;

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
    let mut passed = tell(PRODUCT.name, product(&mut session, options.launches));
    passed &= tell(ATTENTION.name, attention(&mut session, options.launches));
    if !passed {
        tell_log(&mut session);
    }
    passed
}

impl Tile {
    /// Each view's first element among those of a buffer that holds all, and its extents.
    fn views(&self) -> impl Iterator<Item = (u64, &'static [u64])> {
        let views = self.arguments.iter().filter_map(|given| match given {
            Given::View(extents) => Some(*extents),
            Given::Number(_) => None,
        });
        views.scan(APART / 2, |next, extents| {
            let first = *next;
            *next = (first + count(extents)).next_multiple_of(APART / 2) + APART / 2;
            Some((first, extents))
        })
    }

    /// What an element of the buffer holds before: an integer, of each input up to its greatest one, or the canary.
    fn before(&self, at: u64, greatest: &[i64]) -> u16 {
        let inputs = self.views().zip(greatest).zip(0..);
        let mut here = inputs.filter_map(|(((first, extents), greatest), view)| {
            let element = at.checked_sub(first).filter(|element| *element < count(extents))?;
            Some(bf16(input(view, element, *greatest)))
        });
        here.next().unwrap_or(CANARY)
    }

    /// Launches it once and then once for each of `took`, the times in cycles, and has what is in the buffer of all views then checked.
    /// Nothing but the result may have changed.
    fn launch(
        &self,
        session: &mut Session,
        greatest: &[i64],
        took: &mut [u64],
        check: impl FnOnce(&dyn Fn(u64) -> f32) -> Result<(), Wrong>,
    ) -> Outcome<Result<(), Wrong>> {
        let (first, results) =
            self.views().last().map(|(first, extents)| (first, count(extents))).ok_or(WRONG)?;
        let words = (first + results + APART / 2).div_ceil(2);
        let (numbers, bytes) = (Numbers::new(words), 4 * words);
        let before = |at| self.before(at, greatest);
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
                Given::View(extents) => {
                    let (first, _) = views.next().ok_or(WRONG)?;
                    Argument::view(DEVICE, 2 * first, extents)?
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
        greatest: &[i64],
        launches: u64,
        check: impl FnOnce(&dyn Fn(u64) -> f32) -> Result<(), Wrong>,
    ) -> Outcome {
        let mut took = [0; LAUNCHES];
        let took = took.get_mut(..launches as usize).ok_or(WRONG)?;
        let checked = sys::in_user_mode(|| self.launch(session, greatest, took, check))?;
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

/// Every element of C is the rounded sum.
fn product(session: &mut Session, launches: u64) -> Outcome {
    const GREATEST: i64 = 4;
    let &[Given::View(&[_, k]), _, Given::View(&[m, n])] = PRODUCT.arguments else { return Err(WRONG) };
    PRODUCT.run(session, &[GREATEST; 2], launches, |c| {
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let terms = (0..k).map(|i| input(0, row * k + i, GREATEST) * input(1, i * n + column, GREATEST));
            let (found, expected) = (c(at).into(), value(bf16(terms.sum())).into());
            if found != expected {
                return Err(Wrong { place: [0, row, column], of: "C", found, expected });
            }
        }
        Ok(())
    })
}

/// Every element of O is within the tolerance of the weighted sum of the values of the keys that its query sees, those up to its own.
/// Weights are integers, parts of 2^-40.
fn attention(session: &mut Session, launches: u64) -> Outcome {
    const ONE: f64 = (1u64 << 40) as f64;
    const GREATEST: [i64; 3] = [2, 2, 8];
    const TOKENS: usize = match ATTENTION.arguments[0] {
        Given::View(extents) => extents[2] as usize,
        Given::Number(_) => 0,
    };
    let &[Given::View(&[1, heads, _, dim]), .., Given::Number(scale)] = ATTENTION.arguments else {
        return Err(WRONG);
    };
    // Of a score that is so much below the greatest. What is not here is less than a part.
    let step = exp_of_negative(f64::from(f32::from_bits(scale as u32)));
    let mut weights = [0; 256];
    weights.iter_mut().fold(ONE, |weight, place| {
        *place = weight as i64;
        weight * step
    });
    ATTENTION.run(session, &GREATEST, launches, |o| {
        let [q, k, v] = [0, 1, 2]
            .map(|view| move |row: u64, column| input(view, row * dim + column, GREATEST[view as usize]));
        let mut scores = [0; TOKENS];
        for query in 0..heads * TOKENS as u64 {
            let (head, place) = (query / TOKENS as u64, query % TOKENS as u64);
            let first = query - place;
            let scores = &mut scores[..=place as usize];
            for (score, key) in scores.iter_mut().zip(first..) {
                *score = (0..dim).map(|column| q(query, column) * k(key, column)).sum::<i64>();
            }
            let greatest = scores.iter().fold(i64::MIN, |greatest, score| greatest.max(*score));
            for score in scores.iter_mut() {
                *score = weights.get((greatest - *score) as usize).copied().unwrap_or(0);
            }
            let total = scores.iter().sum::<i64>() as f64;
            for column in 0..dim {
                let terms = scores.iter().zip(first..).map(|(weight, key)| weight * v(key, column));
                let (sum, size) = terms.fold((0, 0), |(sum, size), term| (sum + term, size + term.abs()));
                let (found, expected) = (f64::from(o(query * dim + column)), sum as f64 / total);
                let close = (found - expected).abs() <= TOLERANCE * size as f64 / total;
                if !close {
                    return Err(Wrong { place: [head, place, column], of: "O", found, expected });
                }
            }
        }
        Ok(())
    })
}

/// e^-x, of x from 0 to 1.
fn exp_of_negative(x: f64) -> f64 {
    (1..24).rev().fold(1.0, |sum, n| 1.0 - x / f64::from(n) * sum)
}

/// Elements of a view.
fn count(extents: &[u64]) -> u64 {
    extents.iter().product()
}

/// An integer for an element of an input, from −`greatest` to `greatest`.
fn input(view: u64, at: u64, greatest: i64) -> i64 {
    let mixed = (at ^ view << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 40) as i64 % (2 * greatest + 1) - greatest
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
