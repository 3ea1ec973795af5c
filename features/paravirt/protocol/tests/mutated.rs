//! A million mutated frames: no decoder panics, and what is accepted is what the writer would write.

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng};
use vm_paravirt::{Argument, BatchWriter, Info, LogEntry, LogWriter, Range, ReplyWriter, Span, Status, fuzz};

fn batch(fill: impl FnOnce(&mut BatchWriter<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut writer = BatchWriter::new(&mut bytes).unwrap();
    fill(&mut writer);
    let len = writer.finish();
    bytes.truncate(len);
    bytes
}

/// Frames of every kind, with every operation.
fn seeds() -> Vec<Vec<u8>> {
    let mut reply = vec![0; 256];
    let mut writer = ReplyWriter::new(&mut reply, Status::Ok).unwrap();
    writer.result(Status::Ok, &[1; 20]).unwrap();
    writer.result(Status::Deadline, &[]).unwrap();
    let len = writer.finish();
    reply.truncate(len);
    let mut log = vec![0; 256];
    let mut writer = LogWriter::new(&mut log);
    writer.entry(&LogEntry { batch: 1, operation: 2, status: Status::Module, text: "no such op" }).unwrap();
    let len = writer.finish();
    log.truncate(len);
    let info = Info {
        name: "a",
        target: "cpu",
        memory_bytes: 1,
        memory_free: 1,
        deadline_us: 1,
        fuel: 1,
        units: 1,
        lanes: 1,
        block_threads: 1,
        shared_bytes: 1,
        grid: [1; 3],
        modules: 1,
        buffers: 1,
    };
    let mut answer = vec![0; 256];
    let len = info.encode(&mut answer).unwrap();
    answer.truncate(len);
    vec![
        batch(|_| ()),
        batch(|b| {
            b.query().unwrap();
            b.create_module(1, b"\0vir kernel").unwrap();
            b.create_buffer(2, 4096).unwrap();
            b.create_module_from(4, Span { buffer: 2, offset: 8, bytes: 64 }).unwrap();
            b.import_buffer(
                3,
                &[Range { address: 0x1000, bytes: 4096 }, Range { address: 0x8000, bytes: 12 }],
            )
            .unwrap();
        }),
        batch(|b| {
            b.copy((1, 2), (3, 4), 5).unwrap();
            b.fill(Span { buffer: 1, offset: 2, bytes: 3 }, 4).unwrap();
            let view = Argument::view(1, 2, &[3, 4, 5, 6]).unwrap();
            let rows = Argument::strided(1, 2, &[3, 4], &[16]).unwrap();
            b.launch(7, 8, [9, 10, 11], &[view, rows, Argument::f32(1.5), Argument::i64(-1)]).unwrap();
            b.fence().unwrap();
        }),
        batch(|b| {
            b.log().unwrap();
            b.destroy_module(1).unwrap();
            b.destroy_buffer(2).unwrap();
        }),
        reply,
        log,
        answer,
        vm_paravirt::Config::new(1, 2).with_window(3, 4).encode().to_vec(),
        vm_paravirt::FrameHeader { bytes: 64, room: 4096, tag: 5 }.encode().to_vec(),
    ]
}

#[test]
fn a_million_mutated_frames_do_no_harm() {
    const FRAMES: usize = 1_000_000;
    let seeds = seeds();
    assert_eq!(seeds.iter().filter(|seed| fuzz::frame(seed)).count(), 4);
    let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut accepted = 0;
    let mut frame = Vec::new();
    for _ in 0..FRAMES {
        let seed = &seeds[rng.next_u32() as usize % seeds.len()];
        frame.clear();
        frame.extend_from_slice(seed);
        for _ in 0..=rng.next_u32() % 4 {
            let (random, at) = (rng.next_u32(), rng.next_u32() as usize % frame.len().max(1));
            match random % 6 {
                0 if !frame.is_empty() => frame[at] = (random >> 8) as u8,
                1 if !frame.is_empty() => frame[at] ^= 1 << (random >> 8 & 7),
                2 => frame.truncate(at),
                // Whole numbers that are at the edges of something.
                3 if at + 4 <= frame.len() => {
                    let edges = [0, 1, 7, 8, 16, 0x7fff_ffff, 0x8000_0000, u32::MAX, frame.len() as u32];
                    let edge = edges[(random >> 8) as usize % edges.len()];
                    frame[at & !3..][..4].copy_from_slice(&edge.to_le_bytes());
                }
                4 => frame.extend_from_slice(&random.to_le_bytes()),
                5 => {
                    let other = &seeds[(random >> 8) as usize % seeds.len()];
                    frame.extend_from_slice(&other[at.min(other.len())..]);
                }
                _ => {}
            }
            // Half of them tell their own length, or hardly any would come further.
            if random & 0x80 != 0 && frame.len() >= 12 {
                let len = frame.len() as u32;
                frame[8..12].copy_from_slice(&len.to_le_bytes());
            }
        }
        accepted += usize::from(fuzz::frame(&frame));
    }
    println!("{FRAMES} mutated frames, {accepted} of them well formed");
    assert!(accepted > FRAMES / 100, "the mutations miss what they are for");
}

proptest! {
    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        fuzz::frame(&bytes);
    }

    #[test]
    fn a_launch_is_read_as_it_was_written(
        numbers in any::<(u32, u32, [u32; 3], u64)>(),
        arguments in prop::collection::vec(
            prop_oneof![
                any::<u64>().prop_map(Argument::Scalar),
                (any::<u32>(), any::<u64>(), prop::collection::vec(any::<u64>(), 1..5))
                    .prop_map(|(buffer, offset, extents)| Argument::view(buffer, offset, &extents).unwrap()),
                (any::<u32>(), any::<u64>(), prop::collection::vec(any::<u64>(), 1..5), any::<[u64; 3]>()).prop_map(
                    |(buffer, offset, extents, strides)| {
                        Argument::strided(buffer, offset, &extents, &strides[..extents.len() - 1]).unwrap()
                    }
                ),
            ],
            0..=64,
        ),
    ) {
        let (module, kernel, grid, fuel) = numbers;
        let bytes = batch(|b| b.launch_with_fuel(module, kernel, grid, fuel, &arguments).unwrap());
        let batch = vm_paravirt::Batch::decode(&bytes).unwrap();
        let Some(Ok(vm_paravirt::Operation::Launch(launch))) = batch.operations().next() else {
            panic!("no launch");
        };
        prop_assert_eq!((launch.module, launch.kernel, launch.grid, launch.fuel), numbers);
        let read: Vec<_> = launch.arguments.collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(read, arguments);
        prop_assert!(fuzz::frame(&bytes));
    }
}
