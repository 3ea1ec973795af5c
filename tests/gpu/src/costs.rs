//! What ops take, beside what the compiler says that they cost: a launch is refused by the sum of its costs, at a rate of which
//! no op may fall short.
//!
//! An op is done in a chain, each on the result of the one before: what its type leaves is brought back to where it began by
//! another op, which counts too.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vm_accel::{Buffer, Launch, Limits, Worker, arguments};
use vm_cuda::CudaAccelerator;
use vm_ir::filetest::{Random, is_on_values};
use vm_ir::op::{Opcode, Shape, TABLE};
use vm_ir::{Scalar, Trust, text, validate};
use vm_jit::legal::{Support, cost, support, types_of};

use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// Operations of one thread, one behind the other, that a second of a launch's deadline is worth (`docs/paravirt.md`).
const RATE: f64 = (1u64 << 25) as f64;
/// Threads, of a warp, each with three numbers.
const THREADS: usize = 32;
/// Times that an op is in the loop.
const CHAIN: usize = 16;
/// Iterations.
const FEW: i64 = 16;
const MANY: i64 = 1024;
/// How many of the slowest are named.
const NAMED: usize = 8;

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![Test::new("ops one behind the other", measure)]
}

fn measure(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let (worker, target) = (gpu.worker()?, gpu.target()?);
    let mut random = Random(7);
    let mut found = Vec::new();
    for row in TABLE.iter().filter(|row| is_on_values(row)) {
        for (from, to) in types_of(row.opcode) {
            if from == Scalar::Bool || matches!(support(&target, row.opcode, from, to), Support::Rejected(_))
            {
                continue;
            }
            let Some((back, body)) = chain(row.opcode, from, to) else { continue };
            let price = |op, from, to| cost(&target, op, from, to, false);
            let price = price(row.opcode, from, to) + back.map_or(0, |op| price(op, to, from));
            let took = time(gpu, &worker, &mut random, from, &body)?;
            let name = back.map_or(row.mnemonic.to_owned(), |back| format!("{}, {back}", row.mnemonic));
            let ty = if from == to { from.to_string() } else { format!("{from} {to}") };
            found.push((took / price as f64, format!("{name} {ty}: {took:.1} ns, cost {price}")));
        }
    }
    ensure!(found.iter().any(|(ratio, _)| *ratio > 0.0), "no op takes any time");
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    report.note(format!("{} ops; the slowest for their cost:", found.len()));
    found.iter().take(NAMED).for_each(|(ratio, text)| report.note(format!("{ratio:6.2} ns for 1: {text}")));
    let slowest = found.first().map_or(f64::NAN, |(ratio, _)| *ratio);
    report.figure(Figure {
        name: "time of the slowest op, for a cost of 1".into(),
        unit: "ns".into(),
        ours: Sample::of(vec![slowest]),
        peer: None,
        aim: Some(Aim::AtMost(1e9 / RATE)),
    });
    Ok(())
}

/// An op on `%x`, `%y` and `%z` again and again, from `%x0` to its last name, and what brings back its type.
fn chain(op: Opcode, from: Scalar, to: Scalar) -> Option<(Option<Opcode>, String)> {
    let shape = op.shape();
    let back = match shape {
        Shape::Compare(_) => Some(Opcode::Select),
        Shape::Convert(..) => Some(TABLE.iter().map(|row| row.opcode).find(|other| {
            matches!(other.shape(), Shape::Convert(..)) && types_of(*other).contains(&(to, from))
        })?),
        _ if from == to && matches!(shape, Shape::Unary(_) | Shape::Binary(_) | Shape::Ternary(_)) => None,
        _ => return None,
    };
    let operands = shape.operands().unwrap_or(1);
    let mut body = String::new();
    for i in 0..CHAIN {
        // What an assembler could see through, were they always the same.
        let others = if i % 2 == 0 { ["%y", "%z"] } else { ["%z", "%y"] };
        let x = if i == 0 { "%x".to_owned() } else { format!("%x{i}") };
        let names = [&[x.as_str()], &others[..]].concat()[..operands.clamp(1, 3)].join(", ");
        let next = i + 1;
        let _ = match back {
            None => writeln!(body, "%x{next} = {} {names} : {to}", op.mnemonic()),
            Some(Opcode::Select) => writeln!(
                body,
                "%b{next} = {} {names} : bool\n%x{next} = select %b{next}, {}, {x} : {from}",
                op.mnemonic(),
                others[1]
            ),
            Some(back) => writeln!(
                body,
                "%b{next} = {} {names} : {to}\n%x{next} = {} %b{next} : {from}",
                op.mnemonic(),
                back.mnemonic()
            ),
        };
    }
    Some((back, body))
}

/// A kernel of a chain. Its view has each thread's three numbers.
fn source(scalar: Scalar, body: &str) -> String {
    let count = 3 * THREADS;
    format!(
        "vir 1\nkernel @k(@v: view<{scalar}, [{count}], readwrite>, %n: i64) at 0x0 block({THREADS}) {{\n\
         %t = thread_id.x : i32\n%first = sext %t : i64\n%row = const {THREADS} : i64\n%second = add %first, %row : i64\n\
         %third = add %second, %row : i64\n%start = load @v[%first] : {scalar}\n%y = load @v[%second] : {scalar}\n\
         %z = load @v[%third] : {scalar}\n%zero = const 0 : i64\n%one = const 1 : i64\n\
         %end = for %k: i64 = %zero to %n step %one unroll 1 carry(%x: {scalar} = %start) {{\n{body}yield %x{CHAIN}\n}}\n\
         store @v[%first], %end\n}}"
    )
}

/// Nanoseconds for one op of a chain.
fn time(
    gpu: &Gpu,
    worker: &Worker<CudaAccelerator>,
    random: &mut Random,
    scalar: Scalar,
    body: &str,
) -> anyhow::Result<f64> {
    let count = 3 * THREADS;
    let source = source(scalar, body);
    let module = validate(text::parse(&source)?, Trust::Trusted)?;
    let compiled = gpu.compile(&module)?;
    let kernel = worker.load(named(&compiled, "k")?.artifact())?;
    let bytes: Vec<u8> = (0..count)
        .flat_map(|_| random.bits(scalar).to_le_bytes()[..scalar.bytes() as usize].to_vec())
        .collect();
    let buffer: Buffer<CudaAccelerator> = worker.allocate_zeroed(bytes.len() as u64)?;
    let run = |n: i64| -> anyhow::Result<f64> {
        worker.write(&buffer, &bytes)?;
        worker.synchronize(TIMEOUT)?;
        let begin = Instant::now();
        let limits = Limits { fuel: 1 << 40, time: Duration::from_secs(5) };
        worker.launch(&kernel, Launch::over(1).within(limits), &arguments![&buffer, n])?;
        worker.synchronize(TIMEOUT)?;
        Ok(begin.elapsed().as_secs_f64() * 1e9)
    };
    let least = |n| -> anyhow::Result<f64> {
        (0..4).map(|_| run(n)).try_fold(f64::INFINITY, |least, took| Ok(least.min(took?)))
    };
    // What an assembler sees through takes nothing.
    let took = (least(MANY)? - least(FEW)?).max(0.0);
    Ok(took / ((MANY - FEW) as f64 * CHAIN as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chain_is_a_kernel() {
        let mut chains = 0;
        for row in TABLE.iter().filter(|row| is_on_values(row)) {
            for (from, to) in types_of(row.opcode).into_iter().filter(|(from, _)| *from != Scalar::Bool) {
                let Some((_, body)) = chain(row.opcode, from, to) else { continue };
                let source = source(from, &body);
                let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
                validate(module, Trust::Trusted).unwrap_or_else(|error| panic!("{error}\n{source}"));
                chains += 1;
            }
        }
        assert!(chains > 100, "{chains}");
    }
}
