//! The functions of f64 as PTX, run by an interpreter of the few instructions that they are made of, against the
//! IR's interpreter: as close as their class says.

use std::collections::HashMap;
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::op::Opcode;
use vm_ir::{Scalar, Trust, text, validate};
use vm_jit::{Target, compile};

/// Functions, and how many ulps they may be off.
const FUNCTIONS: [(Opcode, u64); 9] = [
    (Opcode::Exp, 2),
    (Opcode::Exp2, 2),
    (Opcode::Log, 2),
    (Opcode::Log2, 2),
    (Opcode::Sin, 2),
    (Opcode::Cos, 2),
    (Opcode::Tanh, 2),
    (Opcode::Erf, 4),
    (Opcode::Pow, 16),
];

/// Registers, by name.
#[derive(Default)]
struct Machine {
    registers: HashMap<String, u64>,
    constants: Vec<u64>,
}

impl Machine {
    fn value(&self, operand: &str) -> u64 {
        if let Some(hex) = operand.strip_prefix("0d") {
            return u64::from_str_radix(hex, 16).unwrap();
        }
        match operand.starts_with('%') {
            true => self.registers[operand],
            false => operand.parse::<i64>().unwrap() as u64,
        }
    }

    /// Runs a kernel that loads numbers, computes and stores one; gives that.
    fn run(&mut self, code: &str, inputs: &[u64]) -> u64 {
        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        let labels: HashMap<&str, usize> =
            lines.iter().enumerate().filter_map(|(i, l)| Some((l.strip_suffix(':')?, i))).collect();
        let mut inputs = inputs.iter();
        let mut at = lines.iter().position(|line| line.contains("ld.global")).unwrap();
        loop {
            let line = lines[at].trim_end_matches(';');
            at += 1;
            if line.ends_with(':') {
                continue;
            }
            let (line, runs) = match line.strip_prefix('@') {
                None => (line, true),
                Some(line) => {
                    let (predicate, rest) = line.split_once(' ').unwrap();
                    let name = predicate.trim_start_matches('!');
                    (rest, (self.registers[name] != 0) != predicate.starts_with('!'))
                }
            };
            if !runs {
                continue;
            }
            let (name, operands) = line.split_once(' ').unwrap();
            let operands: Vec<&str> = operands.split(", ").collect();
            if name.starts_with("bra") {
                at = labels[operands[0]];
                continue;
            }
            if name.starts_with("st.global") {
                return self.value(operands[1]);
            }
            // Addresses are not followed.
            if name.contains("s64")
                && operands.iter().any(|o| o.starts_with('%') && !self.known(o, operands[0]))
            {
                continue;
            }
            let result = match name {
                _ if name.starts_with("ld.global") => *inputs.next().unwrap(),
                "ld.const.b64" => {
                    let place = operands[1].trim_matches(['[', ']']);
                    let (base, offset) = place.split_once('+').unwrap_or((place, "0"));
                    self.constants[(self.value(base) as usize + offset.parse::<usize>().unwrap()) / 8]
                }
                "mov.u64" => 0,
                _ => {
                    let args: Vec<u64> = operands[1..]
                        .iter()
                        .map(|o| {
                            if name == "selp.b64" && o.starts_with("%p") {
                                self.registers[*o]
                            } else {
                                self.value(o)
                            }
                        })
                        .collect();
                    instruction(name, &args)
                }
            };
            self.registers.insert(operands[0].to_owned(), result);
        }
    }

    fn known(&self, operand: &str, target: &str) -> bool {
        operand == target || self.registers.contains_key(operand)
    }
}

fn instruction(name: &str, args: &[u64]) -> u64 {
    let f = |i: usize| f64::from_bits(args[i]);
    let shift = |i: usize| args[i] as u32;
    let kind = name.split('.').next().unwrap();
    let compare = |ordering: Option<std::cmp::Ordering>| {
        let test = name.split('.').nth(1).unwrap();
        u64::from(match (test, ordering) {
            ("nan", ordering) => ordering.is_none(),
            ("lt", Some(o)) => o.is_lt(),
            ("gt", Some(o)) => o.is_gt(),
            ("ge", Some(o)) => o.is_ge(),
            ("eq", Some(o)) => o.is_eq(),
            ("ne", Some(o)) => o.is_ne(),
            (_, None) => false,
            _ => panic!("{name}"),
        })
    };
    match name {
        "add.rn.f64" => (f(0) + f(1)).to_bits(),
        "sub.rn.f64" => (f(0) - f(1)).to_bits(),
        "mul.rn.f64" => (f(0) * f(1)).to_bits(),
        "div.rn.f64" => (f(0) / f(1)).to_bits(),
        "fma.rn.f64" => f(0).mul_add(f(1), f(2)).to_bits(),
        "neg.f64" => (-f(0)).to_bits(),
        "cvt.rzi.f64.f64" => f(0).trunc().to_bits(),
        "cvt.rn.f64.s64" => (args[0] as i64 as f64).to_bits(),
        "cvt.u32.u64" | "cvt.u64.u32" | "mov.b64" | "mov.b32" => args[0],
        "add.s64" => args[0].wrapping_add(args[1]),
        "sub.s64" => args[0].wrapping_sub(args[1]),
        "sub.s32" => u64::from((args[0] as u32).wrapping_sub(args[1] as u32)),
        "neg.s64" => args[0].wrapping_neg(),
        "mul.lo.u64" => args[0].wrapping_mul(args[1]),
        "mul.hi.u64" => ((u128::from(args[0]) * u128::from(args[1])) >> 64) as u64,
        "min.u64" | "min.u32" => args[0].min(args[1]),
        "clz.b64" => u64::from(args[0].leading_zeros()),
        "and.b64" | "and.pred" => args[0] & args[1],
        "or.b64" | "or.pred" => args[0] | args[1],
        "xor.b64" => args[0] ^ args[1],
        "not.pred" => args[0] ^ 1,
        "shl.b64" => args[0].checked_shl(shift(1)).unwrap_or(0),
        "shr.u64" => args[0].checked_shr(shift(1)).unwrap_or(0),
        "shr.s64" => ((args[0] as i64) >> shift(1).min(63)) as u64,
        "selp.b64" => args[usize::from(args[2] == 0)],
        _ if kind == "setp" && name.ends_with("f64") => compare(f(0).partial_cmp(&f(1))),
        _ if kind == "setp" && name.ends_with("s64") => {
            compare(Some((args[0] as i64).cmp(&(args[1] as i64))))
        }
        _ if kind == "setp" => compare(Some(args[0].cmp(&args[1]))),
        _ => panic!("no instruction {name}"),
    }
}

/// Numbers that matter to a function, then others of every size.
fn numbers() -> Vec<f64> {
    let mut all = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.0,
        0.65,
        0.66,
        1e-300,
        5e-324,
        1e-310,
        709.7,
        709.8,
        -745.1,
        -746.0,
        1023.9,
        1024.0,
        -1074.0,
        -1075.0,
        1.5e6,
        1.6e6,
        1e22,
        1e300,
        f64::MAX,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        3.0,
        4.0,
        6.0,
        7.0,
        std::f64::consts::FRAC_PI_2,
        std::f64::consts::PI,
        0.999_999_999_9,
        1.000_000_000_1,
    ];
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for i in 0..3000 {
        let unit = (random() >> 11) as f64 / (1u64 << 53) as f64;
        let sign = if random() & 1 == 0 { 1.0 } else { -1.0 };
        all.push(
            sign * match i % 5 {
                0 => unit,
                1 => unit * 10.0,
                2 => unit * 750.0,
                3 => 0.5 + unit,
                _ => f64::from_bits(random() >> 1),
            },
        );
    }
    all
}

/// A float's place among all floats.
fn ordinal(bits: u64) -> i64 {
    let bits = bits as i64;
    if bits < 0 { i64::MIN.wrapping_sub(bits) } else { bits }
}

#[test]
fn functions() {
    let a = numbers();
    let b: Vec<f64> = a
        .iter()
        .rev()
        .enumerate()
        .map(|(i, x)| if i % 3 == 0 { (x % 50.0).trunc() } else { x % 9.0 })
        .collect();
    for (code, ulps) in FUNCTIONS {
        let name = code.mnemonic();
        let (second, operands) = match code {
            Opcode::Pow => ("  %b = load @b[%i] : f64\n", "%a, %b"),
            _ => ("", "%a"),
        };
        let source = format!(
            "vir 1\nkernel @k(@a: view<f64, [?], read>, @b: view<f64, [?], read>, @y: view<f64, [?], write>) at 0x0 \
             block(1) {{\n  %i = global_id.x : i64\n  %a = load @a[%i] : f64\n{second}  %y = {name} {operands} : f64\n  \
             store @y[%i], %y\n}}\n"
        );
        let module = validate(text::parse(&source).unwrap(), Trust::Trusted).unwrap();
        let tensor = |values: &[f64]| {
            Argument::Tensor(Tensor::from_f64s(Scalar::F64, &[values.len() as u64], values.iter().copied()))
        };
        let mut launch = Launch {
            kernel: "k".into(),
            grid: [a.len() as u32, 1, 1],
            arguments: vec![tensor(&a), tensor(&b), tensor(&vec![0.0; a.len()])],
        };
        run(&module, &mut launch, &Limits::default()).unwrap();
        let expected = launch.arguments[2].tensor().unwrap().to_f64s();

        let target: Target = "ptx:sm_90a".parse().unwrap();
        let artifact = compile(&module, &target).unwrap();
        let code = artifact.text().unwrap();
        let constants = code
            .lines()
            .find(|line| line.contains("quarters["))
            .map(|line| {
                let list = line.split(['{', '}']).nth(1).unwrap();
                list.split(", ").map(|x| u64::from_str_radix(&x[2..], 16).unwrap()).collect()
            })
            .unwrap_or_default();
        let mut machine = Machine { constants, ..Machine::default() };
        for (i, expected) in expected.iter().enumerate() {
            machine.registers.clear();
            let got = f64::from_bits(machine.run(code, &[a[i].to_bits(), b[i].to_bits()]));
            let close = ordinal(got.to_bits()).abs_diff(ordinal(expected.to_bits())) <= ulps;
            let fits = if expected.is_nan() { got.is_nan() } else { close };
            assert!(fits, "{name} of {:e} and {:e}: {got:e} instead of {expected:e}", a[i], b[i]);
        }
    }
}
