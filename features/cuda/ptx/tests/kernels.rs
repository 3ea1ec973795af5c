//! What nvcc made of CUDA kernels, translated and run on the interpreter, against the same in Rust.

mod common;

use common::{Arg, Machine, Program, Random, close, each};

const LINE: [u32; 3] = [256, 1, 1];

/// What nvcc makes with and without optimisation.
const BASICS: &[&str] = &["basics", "basics-debug"];
const GRIDS: &[&str] = &["grids", "grids-debug"];
const MATHS: &[&str] = &["maths"];
const WIDE: &[&str] = &["wide"];
/// What it makes for two architectures.
const SHARED: &[&str] = &["shared", "shared-sm_90", "shared-debug"];

#[test]
fn vector_add() {
    each(BASICS, |mut program| {
        let mut random = Random::new(1);
        let (a, b) = (random.f32s(1000), random.f32s(1000));
        let expect: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let (a, b, c) = (program.put(&a), program.put(&b), program.put(&[0f32; 1000]));
        program.launch("vector_add", [4, 1, 1], LINE, &[a.into(), b.into(), c.into(), 1000i32.into()]);
        assert_eq!(program.get::<f32>(c, 1000), expect);
    });
}

#[test]
fn saxpy() {
    each(BASICS, |mut program| {
        let mut random = Random::new(2);
        let (x, y) = (random.f32s(1000), random.f32s(1000));
        let expect: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 1.5f32.mul_add(*x, *y)).collect();
        let (x, y) = (program.put(&x), program.put(&y));
        program.launch("saxpy", [2, 1, 1], [128, 1, 1], &[1.5f32.into(), x.into(), y.into(), 1000i32.into()]);
        close(&program.get::<f32>(y, 1000), &expect, 1e-5);
    });
}

#[test]
fn mandelbrot() {
    each(BASICS, |mut program| {
        let (width, height, most) = (40usize, 30usize, 60);
        let mut expect = Vec::new();
        for y in 0..height {
            for x in 0..width {
                let (cr, ci) = (-2.0 + 3.0 * x as f32 / width as f32, -1.5 + 3.0 * y as f32 / height as f32);
                let (mut zr, mut zi, mut n) = (0f32, 0f32, 0);
                while zr * zr + zi * zi < 4.0 && n < most {
                    (zr, zi) = (zr * zr - zi * zi + cr, 2.0 * zr * zi + ci);
                    n += 1;
                }
                expect.push(n);
            }
        }
        let out = program.put(&vec![0i32; width * height]);
        let args = [out.into(), (width as i32).into(), (height as i32).into(), most.into()];
        program.launch("mandelbrot", [3, 4, 1], [16, 8, 1], &args);
        let found = program.get::<i32>(out, width * height);
        // Sums are fused there, so points at the border may differ.
        let differ = found.iter().zip(&expect).filter(|(a, b)| a != b).count();
        assert!(differ < expect.len() / 50, "{differ} of {}", expect.len());
    });
}

#[test]
fn mixed() {
    each(BASICS, |mut program| {
        let mut random = Random::new(3);
        let n = 500;
        let a: Vec<f64> = (0..n).map(|_| random.between(-100.0, 100.0)).collect();
        let b = random.i32s(n, -1000, 1000);
        let [sums, out, bytes, halves] = [8, 8, 1, 2].map(|size| program.put(&vec![0u8; n * size]));
        let (at_a, at_b) = (program.put(&a), program.put(&b));
        let args = [at_a, at_b, sums, out, bytes, halves].map(Arg::from);
        let args: Vec<Arg> = args.into_iter().chain([(n as i32).into()]).collect();
        program.launch("mixed", [2, 1, 1], LINE, &args);
        let (sums, out) = (program.get::<i64>(sums, n), program.get::<f64>(out, n));
        let (bytes, halves) = (program.get::<u8>(bytes, n), program.get::<i16>(halves, n));
        for i in 0..n {
            let (v, k) = (a[i], b[i]);
            let expect =
                v * f64::from(k) + f64::from(k / 3) - v.min(2.0) + v.abs().sqrt() / f64::from(1 + k * k);
            assert!((out[i] - expect).abs() <= 1e-10 * expect.abs().max(1.0), "{} {expect}", out[i]);
            assert_eq!(sums[i], i64::from(k) * i64::from(k) * 1_000_003 + v as i64 - i64::from(k % 7));
            assert_eq!(bytes[i], (k * 3) as u8);
            assert_eq!(halves[i], (k >> 2) as i16 + i16::from(k as i8));
        }
    });
}

#[test]
fn choose() {
    each(BASICS, |mut program| {
        let n = 400;
        let a = Random::new(4).i32s(n, -3000, 3000);
        let expect: Vec<i32> = a
            .iter()
            .map(|&v| match v & 15 {
                0 => v + 1,
                1 => v * 3,
                2 => (v ^ 0x55) - (v ^ 0x55) + v - 7,
                3 => v - 7,
                4 => v << 3,
                5 => -v,
                6 => v.count_ones() as i32,
                7 => v.leading_zeros() as i32,
                8 => v.reverse_bits(),
                9 => v.trailing_zeros() as i32 + 1,
                _ => v % 1000,
            })
            .collect();
        let (a, out) = (program.put(&a), program.put(&vec![0i32; n]));
        program.launch("choose", [2, 1, 1], LINE, &[a.into(), out.into(), (n as i32).into()]);
        assert_eq!(program.get::<i32>(out, n), expect);
    });
}

#[test]
fn nested() {
    let one = |v: i32| {
        let mut sum = 0i32;
        'done: for x in 0..20 {
            if (x * v) % 5 == 3 {
                continue;
            }
            for y in x..30 {
                if (y ^ v) % 11 == 0 {
                    break;
                }
                if y == v % 25 {
                    break 'done;
                }
                sum += x * y + v;
                if sum > 100_000 {
                    sum -= 99_999;
                    continue;
                }
                sum ^= y;
            }
            let mut z = v & 7;
            loop {
                sum += z;
                z -= 2;
                if !(z > 0 && sum & 1 != 0) {
                    break;
                }
            }
        }
        sum
    };
    each(BASICS, |mut program| {
        let n = 300;
        let a = Random::new(5).i32s(n, -200, 4000);
        let expect: Vec<i32> = a.iter().map(|v| one(*v)).collect();
        let (a, out) = (program.put(&a), program.put(&vec![0i32; n]));
        program.launch("nested", [3, 1, 1], [128, 1, 1], &[a.into(), out.into(), (n as i32).into()]);
        assert_eq!(program.get::<i32>(out, n), expect);
    });
}

#[test]
fn reduce() {
    each(SHARED, |mut program| {
        let values: Vec<f32> = Random::new(6).i32s(5000, -50, 50).iter().map(|v| *v as f32).collect();
        let sum: f32 = values.iter().sum();
        let (input, out, one) = (program.put(&values), program.put(&[0f32; 4]), program.put(&[0f32]));
        program.launch("reduce", [4, 1, 1], LINE, &[input.into(), out.into(), 5000i32.into()]);
        assert_eq!(program.get::<f32>(out, 4).iter().sum::<f32>(), sum);
        program.launch_shared(
            "reduce_warps",
            [20, 1, 1],
            LINE,
            32,
            &[input.into(), one.into(), 5000i32.into()],
        );
        assert_eq!(program.get::<f32>(one, 1), [sum]);
    });
}

#[test]
fn matmul() {
    each(SHARED, |mut program| {
        let n = 40usize;
        let mut random = Random::new(7);
        let (a, b) = (random.f32s(n * n), random.f32s(n * n));
        let expect: Vec<f32> = (0..n * n)
            .map(|i| {
                (0..n).map(|k| f64::from(a[i / n * n + k]) * f64::from(b[k * n + i % n])).sum::<f64>() as f32
            })
            .collect();
        let (a, b, c) = (program.put(&a), program.put(&b), program.put(&vec![0f32; n * n]));
        let args = [a.into(), b.into(), c.into(), (n as i32).into()];
        program.launch("matmul", [3, 3, 1], [16, 16, 1], &args);
        let found = program.get::<f32>(c, n * n);
        assert!(found.iter().zip(&expect).all(|(a, b)| (a - b).abs() < 1e-3), "{found:?}");
    });
}

#[test]
fn histogram() {
    each(SHARED, |mut program| {
        let input: Vec<u8> = Random::new(8).i32s(3000, 0, 255).iter().map(|v| *v as u8).collect();
        let mut expect = vec![0u32; 256];
        input.iter().for_each(|v| expect[usize::from(*v)] += 1);
        let (input, out) = (program.put(&input), program.put(&[0u32; 256]));
        program.launch("histogram", [3, 1, 1], [192, 1, 1], &[input.into(), out.into(), 3000i32.into()]);
        assert_eq!(program.get::<u32>(out, 256), expect);
    });
}

#[test]
fn scan() {
    each(SHARED, |mut program| {
        let input = Random::new(9).i32s(1024, -100, 100);
        let mut expect = Vec::new();
        for block in input.chunks(512) {
            let mut sum = 0;
            expect.extend(block.iter().map(|v| {
                sum += v;
                sum
            }));
        }
        let (input, out) = (program.put(&input), program.put(&[0i32; 1024]));
        program.launch("scan", [2, 1, 1], [512, 1, 1], &[input.into(), out.into()]);
        assert_eq!(program.get::<i32>(out, 1024), expect);
    });
}

#[test]
fn persistent() {
    each(SHARED, |mut program| {
        let (input, tiles) = (Random::new(23).i32s(128 * 10, -100, 100), 10);
        let expect: Vec<i32> = input.chunks(128).flat_map(|tile| tile.iter().rev().copied()).collect();
        let (at, out, next) = (program.put(&input), program.put(&[0i32; 1280]), program.put(&[0i32]));
        program.launch(
            "persistent",
            [3, 1, 1],
            [128, 1, 1],
            &[at.into(), out.into(), next.into(), tiles.into()],
        );
        assert_eq!(program.get::<i32>(out, 1280), expect);
        assert_eq!(program.get::<i32>(next, 1), [tiles + 3]);
    });
}

#[test]
fn transpose() {
    each(SHARED, |mut program| {
        let (width, height) = (37usize, 50usize);
        let input = Random::new(10).f32s(width * height);
        let expect: Vec<f32> = (0..width * height).map(|i| input[i % height * width + i / height]).collect();
        let (input, out) = (program.put(&input), program.put(&vec![0f32; width * height]));
        let args = [input.into(), out.into(), (width as i32).into(), (height as i32).into()];
        program.launch("transpose", [3, 4, 1], [16, 16, 1], &args);
        assert_eq!(program.get::<f32>(out, width * height), expect);
    });
}

#[test]
fn votes() {
    each(SHARED, |mut program| {
        let input = Random::new(11).i32s(256, -20, 60);
        let mut expect = Vec::new();
        for block in input.chunks(128) {
            let threads = block.iter().filter(|v| **v > 10).count() as u32;
            for warp in block.chunks(32) {
                let even = (0..32).fold(0u32, |bits, i| bits | u32::from(warp[i] % 2 == 0) << i);
                let all = u32::from(warp.iter().all(|v| *v > -100));
                let any = u32::from(warp.contains(&5));
                for lane in 0..32 {
                    let from = if lane % 8 + 2 < 8 { lane + 2 } else { lane };
                    let eights = (warp[lane / 8 * 8 + 3] as u32).wrapping_add(warp[from] as u32);
                    let (some, every) =
                        (u32::from(block.contains(&77)), u32::from(block.iter().all(|v| *v < 1000)));
                    expect.push(
                        even ^ all << 1
                            ^ any << 2
                            ^ eights << 3
                            ^ threads.wrapping_mul(1_000_003)
                            ^ some << 20
                            ^ every << 21,
                    );
                }
            }
        }
        let (input, out) = (program.put(&input), program.put(&[0u32; 256]));
        program.launch("votes", [2, 1, 1], [128, 1, 1], &[input.into(), out.into()]);
        assert_eq!(program.get::<u32>(out, 256), expect);
    });
}

#[test]
fn atomics() {
    each(SHARED, |mut program| {
        // The kernel reads one of the words that others change.
        program.limits.races = false;
        let input = Random::new(12).i32s(256, -500, 500);
        let of = |f: &dyn Fn(i32) -> u32| input.iter().map(|v| f(*v)).collect::<Vec<_>>();
        let (or, and) = (of(&|v| 1 << (v & 31)), of(&|v| !(1 << (v & 15))));
        let xor = of(&|v| v as u32).into_iter().fold(7, |a, b| a ^ b);
        let longs: u64 = input.iter().map(|v| (*v & 1023) as u64).sum();
        let floats: f32 = input.iter().map(|v| (*v & 7) as f32).sum();
        let steps: i32 = input.iter().map(|v| v & 3).sum();
        let least = *input.iter().min().unwrap();
        let most = *input.iter().max().unwrap();
        let ints = program.put(&[0i32, 0, 5]);
        let words = program.put(&[0u32, u32::MAX, 7, 2, 3]);
        let (at_longs, at_floats) = (program.put(&[1u64 << 40]), program.put(&[0.5f32]));
        let args = [ints, words, at_longs, at_floats, program.put(&input)].map(Arg::from);
        program.launch("atomics", [2, 1, 1], [128, 1, 1], &args);
        assert_eq!(program.get::<i32>(ints, 3), [least, most, 5 + steps]);
        // From 2, 256 times up to 6 and round; from 3 down, round to 9.
        let inc = (2 + 256) % 7;
        let dec = 3 + 10 * 26 - 256;
        let expect =
            [or.iter().fold(0, |a, b| a | b), and.iter().fold(u32::MAX, |a, b| a & b), xor, inc, dec];
        assert_eq!(program.get::<u32>(words, 5), expect);
        assert_eq!(program.get::<u64>(at_longs, 1), [(1 << 40) + longs]);
        assert_eq!(program.get::<f32>(at_floats, 1), [0.5 + floats]);
    });
}

#[test]
fn stencils() {
    each(GRIDS, |mut program| {
        let (width, height) = (33usize, 21usize);
        let input = Random::new(13).f32s(width * height);
        let mut expect = Vec::new();
        for y in 0..height {
            for x in 0..width {
                let at = |x: usize, y: usize| input[y * width + x];
                let mut sum = 0.5 * at(x, y);
                sum += if x > 0 { 0.125 * at(x - 1, y) } else { 0.0 };
                sum += if x < width - 1 { 0.125 * at(x + 1, y) } else { 0.0 };
                sum += if y > 0 { 0.125 * at(x, y - 1) } else { 0.0 };
                sum += if y < height - 1 { 0.125 * at(x, y + 1) } else { 0.0 };
                expect.push(sum);
            }
        }
        let (at, out) = (program.put(&input), program.put(&vec![0f32; width * height]));
        let args = [at.into(), out.into(), (width as i32).into(), (height as i32).into()];
        program.launch("stencil2", [3, 3, 1], [16, 8, 1], &args);
        let found = program.get::<f32>(out, width * height);
        assert!(found.iter().zip(&expect).all(|(a, b)| (a - b).abs() < 1e-5));

        let size = [9usize, 7, 6];
        let count = size.iter().product();
        let input: Vec<f64> = Random::new(14).f32s(count).iter().map(|v| f64::from(*v)).collect();
        let mut expect = vec![0f64; count];
        let plane = size[0] * size[1];
        for z in 1..size[2] - 1 {
            for y in 1..size[1] - 1 {
                for x in 1..size[0] - 1 {
                    let i = z * plane + y * size[0] + x;
                    expect[i] = input[i] * -6.0
                        + input[i - 1]
                        + input[i + 1]
                        + input[i - size[0]]
                        + input[i + size[0]]
                        + input[i - plane]
                        + input[i + plane];
                }
            }
        }
        let (at, out) = (program.put(&input), program.put(&vec![0f64; count]));
        let sizes: Vec<u8> = size.iter().flat_map(|s| (*s as i32).to_le_bytes()).collect();
        program.launch("stencil3", [2, 2, 1], [8, 4, 1], &[at.into(), out.into(), sizes.into()]);
        let found = program.get::<f64>(out, count);
        assert!(found.iter().zip(&expect).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
    });
}

#[test]
fn particles() {
    each(GRIDS, |mut program| {
        let n = 100;
        let input = Random::new(15).f32s(4 * n);
        let (at, out) = (program.put(&input), program.put(&vec![0f32; n]));
        // double strength; char sign; short turns; int on; float scale[3].
        let field = |on: i32| {
            let mut bytes = 2.5f64.to_le_bytes().to_vec();
            bytes.extend([-1i8 as u8, 0]);
            bytes.extend(3i16.to_le_bytes());
            bytes.extend(on.to_le_bytes());
            bytes.extend([1f32, -2.0, 0.5].iter().flat_map(|s| s.to_le_bytes()));
            bytes.extend([0; 4]);
            bytes
        };
        for (run, on) in [1, 0].into_iter().enumerate() {
            program.launch(
                "particles",
                [1, 1, 1],
                LINE,
                &[at.into(), out.into(), field(on).into(), (n as i32).into()],
            );
            let expect: Vec<f32> = input
                .chunks(4)
                .enumerate()
                .map(|(i, p)| {
                    let (x, y, z, mass) = (p[0], -2.0 * p[1], 0.5 * p[2], p[3] + 3.0);
                    let e = mass * (x * x + y * y + z * z);
                    let table = [2.0, 4.0];
                    (if on == 1 { -(e * 2.5) } else { e }) + table[i & 1]
                })
                .collect();
            let found = program.get::<f32>(out, n);
            assert!(found.iter().zip(&expect).all(|(a, b)| (a - b).abs() < 2e-3), "{found:?} {expect:?}");
            assert_eq!(program.get::<i32>(program.symbol("calls"), 1), [(n * (run + 1)) as i32]);
        }
    });
}

#[test]
fn integers() {
    each(MATHS, |mut program| {
        let n = 200;
        let mut random = Random::new(16);
        let (a, b): (Vec<i32>, Vec<i32>) =
            (0..n).map(|_| (random.next() as i32, random.next() as i32)).unzip();
        let (at_a, at_b, out) = (program.put(&a), program.put(&b), program.put(&vec![0i32; 16 * n]));
        program.launch(
            "integers",
            [1, 1, 1],
            LINE,
            &[at_a.into(), at_b.into(), out.into(), (n as i32).into()],
        );
        let found = program.get::<i32>(out, 16 * n);
        let permute = |x: u32, y: u32, s: u32| {
            let both = (u64::from(y) << 32 | u64::from(x)).to_le_bytes();
            u32::from_le_bytes([0, 1, 2, 3].map(|at| {
                let nibble = s >> (4 * at) & 15;
                let byte = both[(nibble & 7) as usize];
                if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
            }))
        };
        for i in 0..n {
            let (x, y) = (a[i], b[i]);
            let (ux, uy) = (x as u32, y as u32);
            let both = u64::from(uy) << 32 | u64::from(ux);
            let wide = u64::from(ux) << 32 | u64::from(uy);
            let low24 = |v: i32| v << 8 >> 8;
            let expect = [
                ((i64::from(x) * i64::from(y)) >> 32) as i32,
                ((u64::from(ux) * u64::from(uy)) >> 32) as i32,
                permute(ux, uy, 0x3715) as i32,
                // CUDA's __byte_perm takes three bits of each digit.
                permute(ux, uy, uy & 0x7777) as i32,
                ((both << (uy & 31)) >> 32) as i32,
                (both >> 7) as i32,
                (x.max(y) as u32).wrapping_sub(ux.min(uy)) as i32,
                x.wrapping_abs(),
                (i64::from(x) - i64::from(y)).unsigned_abs().wrapping_add(3) as i32,
                (x & y) ^ (!x | (y << 3)),
                (0..4)
                    .map(|k| i32::from((x >> (8 * k)) as i8) * i32::from((y >> (8 * k)) as i8))
                    .sum::<i32>()
                    + 5,
                (ux / (uy | 1)) as i32,
                x >> (y & 31),
                ((i64::from(x) * i64::from(y)) >> 13) as i32,
                low24(x).wrapping_mul(low24(y)),
                wide.leading_zeros() as i32
                    + wide.count_ones() as i32 * 100
                    + wide.trailing_zeros() as i32
                    + 1,
            ];
            assert_eq!(found[16 * i..16 * (i + 1)], expect, "{x:#x} {y:#x}");
        }
    });
}

#[test]
fn fast() {
    each(MATHS, |mut program| {
        let n = 200;
        let x = Random::new(17).f32s(n);
        let (at, out) = (program.put(&x), program.put(&vec![0f32; 8 * n]));
        program.launch("fast", [1, 1, 1], LINE, &[at.into(), out.into(), (n as i32).into()]);
        let found = program.get::<f32>(out, 8 * n);
        for (i, v) in x.iter().enumerate() {
            let found = &found[8 * i..8 * (i + 1)];
            let near = [v.exp(), v.abs().ln(), v.sin(), v.cos(), v / 3.0];
            for (at, (found, expect)) in found.iter().zip(near).enumerate() {
                assert!(
                    (found - expect).abs() < 2e-6 * expect.abs().max(1.0),
                    "{at} of {v}: {found}, not {expect}"
                );
            }
            assert_eq!(found[5], v.clamp(0.0, 1.0));
            let exact = f64::from(*v) * f64::from(1.1f32) + f64::from(0.3f32);
            let toward_zero = {
                let near = exact as f32;
                if f64::from(near).abs() > exact.abs() { f32::from_bits(near.to_bits() - 1) } else { near }
            };
            assert_eq!(found[6], toward_zero, "{v}");
            let exact = f64::from(*v) + f64::from(1e-9f32);
            let near = exact as f32;
            let down = match f64::from(near) > exact {
                true if near > 0.0 => f32::from_bits(near.to_bits() - 1),
                true => f32::from_bits(near.to_bits() + 1),
                false => near,
            };
            assert_eq!(found[7], down, "{v}");
        }
    });
}

#[test]
fn halves() {
    use vm_ir::Scalar::{Bf16, F16};
    use vm_ir::format::{from_f64, to_f64};
    let f16 = |value: f64| to_f64(F16, from_f64(F16, value));
    each(MATHS, |mut program| {
        let n = 100;
        let mut random = Random::new(18);
        let mut numbers =
            |count: usize| -> Vec<f64> { (0..count).map(|_| f16(random.between(-4.0, 4.0))).collect() };
        let (a, b) = (numbers(2 * n), numbers(2 * n));
        let bits =
            |values: &[f64], scalar| values.iter().map(|v| from_f64(scalar, *v) as u16).collect::<Vec<_>>();
        let (at_a, at_b) = (program.put(&bits(&a, F16)), program.put(&bits(&b, F16)));
        let (c, sums) = (program.put(&vec![0u16; 2 * n]), program.put(&vec![0u16; n]));
        let args = [at_a.into(), at_b.into(), c.into(), sums.into(), (n as i32).into()];
        program.launch("halves", [1, 1, 1], LINE, &args);
        let v: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f16(f16(a * b + 0.5) + f16(a * a))).collect();
        let expect: Vec<f64> = v.iter().zip(&b).map(|(v, b)| v.max(-b)).collect();
        // Nvcc may fuse the product and the sum.
        let near = |found: f64, expect: f64| (found - expect).abs() <= 0.01 * expect.abs().max(1.0);
        for (found, expect) in program.get::<u16>(c, 2 * n).iter().zip(&expect) {
            assert!(near(to_f64(F16, u64::from(*found)), *expect), "{found:#x} {expect}");
        }
        for (found, v) in program.get::<u16>(sums, n).iter().zip(v.chunks(2)) {
            let (found, sum) = (to_f64(F16, u64::from(*found)), v[0] + v[1]);
            assert!(
                (sum - 1.0).abs() < 0.02 || near(found, if sum > 1.0 { 2.0 } else { v[0] / 3.0 }),
                "{found} {v:?}"
            );
        }

        let a: Vec<f64> = a.iter().map(|v| to_f64(Bf16, from_f64(Bf16, *v))).collect();
        let at_a = program.put(&bits(&a, Bf16));
        let (out, pairs) = (program.put(&vec![0f32; 2 * n]), program.put(&vec![0u16; 4 * n]));
        program.launch(
            "brains",
            [1, 1, 1],
            LINE,
            &[at_a.into(), out.into(), pairs.into(), (2 * n as i32).into()],
        );
        let expect: Vec<f32> = a.iter().map(|v| *v as f32 * 1.5).collect();
        assert_eq!(program.get::<f32>(out, 2 * n), expect);
        let pairs_expected: Vec<f64> = expect.iter().flat_map(|v| [f64::from(*v), f64::from(-v)]).collect();
        assert_eq!(program.get::<u16>(pairs, 4 * n), bits(&pairs_expected, Bf16));
    });
}

#[test]
fn numbers() {
    each(GRIDS, |mut program| {
        let n = 300;
        let mut random = Random::new(19);
        let (a, b) = (random.i32s(n, 0, 5000), random.i32s(n, 1, 5000));
        let one = |a: i32, b: i32| {
            let smallest = (2..).take_while(|i| i * i <= a).find(|i| a % i == 0);
            let prime = a >= 2 && smallest.is_none();
            let (mut x, mut y) = (a, b);
            while y != 0 {
                (x, y) = (y, x % y);
            }
            x * 1000 + smallest.unwrap_or(1) * 2 + i32::from(prime)
        };
        let expect: Vec<i32> = a.iter().zip(&b).map(|(a, b)| one(*a, *b)).collect();
        let (a, b, out) = (program.put(&a), program.put(&b), program.put(&vec![0i32; n]));
        program.launch("numbers", [2, 1, 1], LINE, &[a.into(), b.into(), out.into(), (n as i32).into()]);
        assert_eq!(program.get::<i32>(out, n), expect);
    });
}

#[test]
fn sort_in_local_memory() {
    each(GRIDS, |mut program| {
        for count in [1usize, 7, 16] {
            let input = Random::new(20).i32s(64 * count, -1000, 1000);
            let mut expect = input.clone();
            expect.chunks_mut(count).for_each(<[i32]>::sort_unstable);
            let (input, out) = (program.put(&input), program.put(&vec![0i32; 64 * count]));
            program.launch(
                "sort8",
                [2, 1, 1],
                [32, 1, 1],
                &[input.into(), out.into(), (count as i32).into()],
            );
            assert_eq!(program.get::<i32>(out, 64 * count), expect);
        }
    });
}

#[test]
fn functions() {
    each(MATHS, |mut program| {
        let mut random = Random::new(21);
        let mut x = random.f32s(60);
        // The long way round the circle, and where functions end.
        x.extend([
            1e5,
            -3.3e7,
            1.2345e20,
            3e38,
            0.0,
            -0.0,
            1e-30,
            88.0,
            -87.0,
            120.0,
            f32::INFINITY,
            f32::NAN,
            0.5,
            1.0,
        ]);
        let n = x.len();
        let (at, out) = (program.put(&x), program.put(&vec![0f32; 16 * n]));
        program.launch("functions", [1, 1, 1], [128, 1, 1], &[at.into(), out.into(), (n as i32).into()]);
        let found = program.get::<f32>(out, 16 * n);
        for (v, found) in x.iter().zip(found.chunks(16)) {
            let d = f64::from(*v);
            let expect = [
                d.exp(),
                d.abs().ln(),
                d.sin(),
                d.cos(),
                d.tanh(),
                d.abs().powf(f64::from(1.7f32)),
                d.abs().sqrt(),
                1.0 / d.abs().sqrt(),
                libm::erf(d),
                d / f64::from(3.7f32),
                d.atan(),
                d.floor(),
                f64::from(v.round_ties_even()),
                d % 2.5,
                d.cbrt(),
                d.abs().ln_1p(),
            ];
            for (at, (found, expect)) in found.iter().zip(expect).enumerate() {
                let expect = expect as f32;
                let error = (found - expect).abs();
                // Of few ulps, as CUDA says of these.
                let fits = *found == expect
                    || found.is_nan() && expect.is_nan()
                    || error <= 1.5e-6 * expect.abs().max(1e-6);
                assert!(fits, "function {at} of {v}: {found}, not {expect}");
            }
        }
    });
}

#[test]
fn doubles() {
    each(MATHS, |mut program| {
        let mut random = Random::new(22);
        let mut x: Vec<f64> = (0..40).map(|_| random.between(-20.0, 20.0)).collect();
        x.extend([1e5, -3.3e9, 1.2345e200, 1e-300, 0.0, 700.0, f64::INFINITY, 0.5, 1.0]);
        let n = x.len();
        let (at, out) = (program.put(&x), program.put(&vec![0f64; 8 * n]));
        program.launch("doubles", [1, 1, 1], [64, 1, 1], &[at.into(), out.into(), (n as i32).into()]);
        let found = program.get::<f64>(out, 8 * n);
        for (v, found) in x.iter().zip(found.chunks(8)) {
            let expect = [
                v.exp(),
                v.abs().ln(),
                v.sin(),
                v.cos(),
                v.tanh(),
                v.abs().powf(1.7),
                1.0 / v.abs().sqrt(),
                v / 3.7,
            ];
            for (at, (found, expect)) in found.iter().zip(expect).enumerate() {
                let fits = *found == expect
                    || found.is_nan() && expect.is_nan()
                    || (found - expect).abs() <= 2e-15 * expect.abs();
                assert!(fits, "function {at} of {v}: {found}, not {expect}");
            }
        }
    });
}

#[test]
fn matmul_in_registers() {
    each(SHARED, |mut program| {
        let n = 64usize;
        let mut random = Random::new(24);
        let mut numbers = || random.i32s(n * n, -4, 4).into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let (a, b) = (numbers(), numbers());
        let element = |i: usize| (0..n).map(|k| a[i / n * n + k] * b[k * n + i % n]).sum();
        let expect: Vec<f32> = (0..n * n).map(element).collect();
        let (a, b, c) = (program.put(&a), program.put(&b), program.put(&vec![0f32; n * n]));
        let args = [a.into(), b.into(), c.into(), (n as i32).into()];
        program.launch("matmul_registers", [1, 1, 1], [64, 1, 1], &args);
        assert_eq!(program.get::<f32>(c, n * n), expect);
    });
}

#[test]
fn rows_of_warps() {
    each(SHARED, |mut program| {
        let input = Random::new(25).i32s(128, -100, 100);
        let expect: Vec<i32> = (0..128).map(|i| if i < 64 { input[i ^ 1] * 2 } else { 0 }).collect();
        let (at, out) = (program.put(&input), program.put(&[0i32; 128]));
        program.launch("rows", [1, 1, 1], [32, 4, 1], &[at.into(), out.into()]);
        assert_eq!(program.get::<i32>(out, 128), expect);
    });
}

#[test]
fn sums_of_halves() {
    use vm_ir::Scalar::{Bf16, F16};
    use vm_ir::format::from_f64;
    each(MATHS, |mut program| {
        // Before sm_90 CUDA reads numbers of bf16 first, not atomically.
        program.limits.races = false;
        let bits = |value: f64| from_f64(F16, value) as u16;
        let input: Vec<u16> = (0..64).map(|i| bits(f64::from(i % 8))).collect();
        let (at, out) = (program.put(&input), program.put(&[0u16; 2]));
        let (pairs, brains) = (program.put(&[0u16; 2]), program.put(&[0u16; 2]));
        program.launch(
            "half_sums",
            [1, 1, 1],
            [64, 1, 1],
            &[at.into(), out.into(), pairs.into(), brains.into()],
        );
        assert_eq!(program.get::<u16>(out, 2), [bits(96.0), bits(128.0)]);
        assert_eq!(program.get::<u16>(pairs, 2), [bits(224.0), bits(64.0)]);
        assert_eq!(program.get::<u16>(brains, 2), [128.0, -64.0].map(|v| from_f64(Bf16, v) as u16));
    });
}

#[test]
fn copies() {
    each(MATHS, |mut program| {
        let input = Random::new(26).i32s(256, -100, 100);
        let expect: Vec<i32> = input.chunks(4).rev().flatten().copied().collect();
        let (at, out) = (program.put(&input), program.put(&[0i32; 256]));
        program.launch("copies", [1, 1, 1], [64, 1, 1], &[at.into(), out.into()]);
        assert_eq!(program.get::<i32>(out, 256), expect);
    });
}

#[test]
fn many_parameters() {
    each(GRIDS, |mut program| {
        let values: Vec<i64> = (0..90).map(|i| i * i - 100).collect();
        let mut many = 80i64.to_le_bytes().to_vec();
        many.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let out = program.put(&[0i64; 90]);
        program.launch("many", [1, 1, 1], [128, 1, 1], &[many.into(), out.into(), 7i32.into()]);
        let expect: Vec<i64> = (0..90).map(|i| if i < 80 { values[i] * 7 + values[88] } else { 0 }).collect();
        assert_eq!(program.get::<i64>(out, 90), expect);
    });
}

#[test]
fn early_returns() {
    each(SHARED, |mut program| {
        let (n, rounds) = (230usize, 4);
        let input = Random::new(27).i32s(256, 0, 300);
        let mut expect = vec![-1; 256];
        for block in 0..2 {
            let first = block * 128;
            let threads = 128.min(n - first);
            let mut v: Vec<i32> = (0..threads).map(|t| input[first + t] + input[first + (t ^ 1)]).collect();
            let mut alive = vec![true; threads];
            for k in 0..rounds {
                let end = |t: usize, value: i32, alive: &mut Vec<bool>, expect: &mut Vec<i32>| {
                    alive[t] = false;
                    expect[first + t] = value;
                };
                for t in 0..threads {
                    if alive[t] && v[t] % 7 == k {
                        end(t, 1000 + k, &mut alive, &mut expect);
                    }
                }
                let odd: Vec<bool> = (0..threads).map(|t| alive[t] && v[t] & 1 == 1).collect();
                for t in (0..threads).filter(|t| alive[*t]).collect::<Vec<_>>() {
                    let warp = t / 32 * 32..threads.min(t / 32 * 32 + 32);
                    v[t] += odd[warp].iter().filter(|odd| **odd).count() as i32;
                    for j in 0..(t & 3) as i32 {
                        if v[t] > 5000 {
                            end(t, v[t], &mut alive, &mut expect);
                            break;
                        }
                        v[t] += j * 1000;
                    }
                }
            }
            let odd = (0..threads).filter(|t| alive[*t] && v[*t] & 1 == 1).count() as i32;
            (0..threads).filter(|t| alive[*t]).for_each(|t| expect[first + t] = v[t] + odd);
        }
        let (at, out) = (program.put(&input), program.put(&[-1i32; 256]));
        let args = [at.into(), out.into(), (n as i32).into(), rounds.into()];
        program.launch("early", [2, 1, 1], [128, 1, 1], &args);
        assert_eq!(program.get::<i32>(out, 256), expect);
    });
}

#[test]
fn functions_with_shared_memory() {
    each(SHARED, |mut program| {
        let input = Random::new(28).i32s(64, -100, 100);
        let expect: Vec<i32> = (0..64).map(|i| input[i] * 2 + input[63 - i]).collect();
        let (at, out) = (program.put(&input), program.put(&[0i32; 64]));
        program.launch("calls", [1, 1, 1], [64, 1, 1], &[at.into(), out.into()]);
        assert_eq!(program.get::<i32>(out, 64), expect);
        assert_eq!(program.translate("calls", [64, 1, 1], 0).unwrap().shared, 256);
    });
}

/// A function that takes the address of what it is passed has its own copy in local memory, as nvcc indexes a structure.
#[test]
fn addresses_of_parameters() {
    let text = ".version 7.8\n.target sm_75\n.address_size 64\n\
        .visible .func (.param .b32 result) pick(.param .b32 which, .param .align 4 .b8 from[14]) {\n\
            .reg .b32 %r<4>; .reg .b64 %d<4>;\n\
            ld.param.u32 %r1, [which]; mov.b64 %d1, from; cvta.local.u64 %d2, %d1;\n\
            mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d1, %d3; ld.local.u32 %r2, [%d3];\n\
            add.u32 %r2, %r2, 100; st.u32 [%d2+4], %r2; ld.param.u32 %r3, [from+4]; ld.local.u16 %r1, [%d1+12];\n\
            add.u32 %r3, %r3, %r1; st.param.b32 [result], %r3; ret;\n}\n\
        .visible .entry k(.param .u64 in, .param .u64 out) {\n\
            .reg .b16 %h; .reg .b32 %r<8>; .reg .b64 %d<4>;\n\
            ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;\n\
            add.s64 %d2, %d2, %d3; ld.global.v2.u32 {%r2, %r3}, [%d1]; ld.global.u32 %r4, [%d1+8]; mov.u16 %h, 7;\n\
            { .param .b32 p0; .param .align 4 .b8 p1[14]; .param .b32 r0;\n\
              st.param.b32 [p0], %r1; st.param.v2.b32 [p1], {%r2, %r3}; st.param.b32 [p1+8], %r4; st.param.b16 [p1+12], %h;\n\
              call (r0), pick, (p0, p1); ld.param.b32 %r5, [r0];\n\
              st.param.b32 [p0], 0; call (r0), pick, (p0, p1); ld.param.b32 %r6, [r0]; }\n\
            mad.lo.u32 %r5, %r6, 1000, %r5; st.global.u32 [%d2], %r5; ret;\n}\n";
    for machine in Machine::all() {
        let mut program = Program::on(text, machine);
        let (input, out) = (program.put(&[1u32, 2, 3]), program.put(&[0u32; 3]));
        program.launch("k", [1, 1, 1], [3, 1, 1], &[input.into(), out.into()]);
        let expect = [1, 2, 3].map(|picked| 108_000 + 107 + picked);
        assert_eq!(program.get::<u32>(out, 3), expect, "{machine:?}");
    }
}

#[test]
fn last_block() {
    each(SHARED, |mut program| {
        // The last block puts the counter back, which others changed atomically.
        program.limits.races = false;
        let input: Vec<f32> = Random::new(29).i32s(3000, -50, 50).iter().map(|v| *v as f32).collect();
        let (at, parts) = (program.put(&input), program.put(&[0f32; 7]));
        let (out, count) = (program.put(&[0f32]), program.put(&[0u32]));
        let args = [at.into(), parts.into(), out.into(), count.into(), 3000i32.into()];
        for _ in 0..2 {
            program.launch("last_block", [7, 1, 1], [128, 1, 1], &args);
            assert_eq!(program.get::<f32>(out, 1), [input.iter().sum::<f32>()]);
            assert_eq!(program.get::<u32>(count, 1), [0]);
        }
    });
}

#[test]
fn parts_of_warps() {
    each(MATHS, |mut program| {
        let mut input = Random::new(30).i32s(64, -70, 900);
        let of_part = |part: &[i32]| part.iter().max().unwrap() * 1000 + part.iter().sum::<i32>();
        let expect: Vec<i32> = input.chunks(8).flat_map(|part| [of_part(part); 8]).collect();
        let (at, out) = (program.put(&input), program.put(&[0i32; 64]));
        program.launch("parts", [1, 1, 1], [64, 1, 1], &[at.into(), out.into()]);
        assert_eq!(program.get::<i32>(out, 64), expect);
        // An assertion that fails, and a trap: such launches don't end well.
        program.limits.fuel = 1 << 20;
        for wrong in [1000, -77] {
            input[5] = wrong;
            let at = program.put(&input);
            let ended = program.attempt("parts", [1, 1, 1], [64, 1, 1], 0, &[at.into(), out.into()]);
            assert!(ended.is_err(), "{wrong}");
        }
    });
}

/// Integers of 128 bits, whose quotients nvcc computes with carries and borrows.
#[test]
fn wide() {
    let mut random = Random::new(31);
    let mut number = || {
        let (low, high) = (u128::from(random.next()), u128::from(random.next()));
        (low | high << 64) >> random.below(128) << random.below(3)
    };
    let mut pairs: Vec<(u128, u128)> = (0..125).map(|_| (number(), number())).collect();
    pairs.extend([(1 << 127, u128::MAX - 1), (5, 7), (u128::MAX, 3)]);
    let words = |of: &dyn Fn(&(u128, u128)) -> u128| -> Vec<u64> {
        pairs.iter().flat_map(|pair| [of(pair) as u64, (of(pair) >> 64) as u64]).collect()
    };
    let (a, b) = (words(&|pair| pair.0), words(&|pair| pair.1 | 1));
    let expect: Vec<u64> = pairs
        .iter()
        .flat_map(|(a, b)| {
            let (b, x, y) = (b | 1, *a as i128, (b | 1) as i128);
            let less = u128::from(x < y) | u128::from(*a < b) << 1;
            let results = [
                a.wrapping_add(b),
                a.wrapping_sub(b),
                a.wrapping_mul(b),
                a / b,
                a % b,
                x.wrapping_div(y) as u128,
                x.wrapping_rem(y) as u128,
                a / 1_000_003,
                (x % 1000) as u128,
                a << (b & 127),
                (x >> (b & 127)) as u128,
                less,
            ];
            results.into_iter().flat_map(|result| [result as u64, (result >> 64) as u64])
        })
        .collect();
    each(WIDE, |mut program| {
        let (a, b, out) = (program.put(&a), program.put(&b), program.put(&vec![0u64; expect.len()]));
        program.launch("wide", [1, 1, 1], [128, 1, 1], &[a.into(), b.into(), out.into()]);
        let found = program.get::<u64>(out, expect.len());
        for (at, (found, expect)) in found.chunks(24).zip(expect.chunks(24)).enumerate() {
            assert_eq!(found, expect, "{:x?}", pairs[at]);
        }
    });
}
