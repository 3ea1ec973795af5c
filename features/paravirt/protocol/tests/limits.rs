//! Frames at their limits: the largest that is accepted and the smallest that is rejected, and the bytes of each operation.

use vm_paravirt::{
    Argument, Batch, BatchWriter, Info, LogEntry, LogReader, LogWriter, MAX_ARGUMENTS, MAX_BATCH_BYTES,
    MAX_OPERATIONS, MAX_RANGES, MAX_REPLY_BYTES, MAX_TEXT, NoRoom, Operation, Range, Reply, ReplyWriter,
    Span, Status, reply_bytes,
};

const HEADER: usize = 16;

type Write = fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>;

/// A batch with these operations, each a code and a body.
fn raw(operations: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = b"vmab\x01\0\0\0".to_vec();
    bytes.extend([0; 4]);
    bytes.extend((operations.len() as u32).to_le_bytes());
    for (code, body) in operations {
        bytes.extend(code.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend((8 + body.len() as u32).to_le_bytes());
        bytes.extend(*body);
    }
    let len = bytes.len() as u32;
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Where a batch is malformed, and how; `None` for one that is not.
fn wrong(bytes: &[u8]) -> Option<(usize, &'static str)> {
    Batch::decode(bytes).err().map(|error| (error.offset, error.what))
}

/// Each operation, its code and the 32-bit words of its body.
fn operations() -> Vec<(Write, u16, Vec<u32>)> {
    vec![
        (|b| b.query(), 1, vec![]),
        (|b| b.create_module(7, b"\x01\x02\x03\x04\x05"), 2, vec![7, 5, 0x0403_0201, 5]),
        (
            |b| b.create_module(7, b"\x01\x02\x03\x04\x05\x06\x07\x08"),
            2,
            vec![7, 8, 0x0403_0201, 0x0807_0605],
        ),
        (|b| b.destroy_module(7), 3, vec![7, 0]),
        (|b| b.create_buffer(7, 1 << 32 | 9), 4, vec![7, 0, 9, 1]),
        (
            |b| b.import_buffer(7, &[Range { address: 1 << 33, bytes: 4 }, Range { address: 5, bytes: 6 }]),
            5,
            vec![7, 2, 0, 2, 4, 0, 5, 0, 6, 0],
        ),
        (|b| b.destroy_buffer(7), 6, vec![7, 0]),
        (|b| b.copy((1, 2), (3, 4), 5), 7, vec![1, 3, 2, 0, 4, 0, 5, 0]),
        (|b| b.fill(Span { buffer: 1, offset: 2, bytes: 3 }, 255), 8, vec![1, 255, 2, 0, 3, 0]),
        (|b| b.launch(1, 2, [3, 4, 5], &[]), 9, vec![1, 2, 3, 4, 5, 0, 0, 0]),
        (
            |b| {
                let view = Argument::view(7, 8, &[9, 10])?;
                let rows = Argument::strided(7, 8, &[9, 10], &[64])?;
                b.launch_with_fuel(1, 2, [3, 4, 5], 6, &[view, Argument::i32(-1), rows])
            },
            9,
            vec![
                1,
                2,
                3,
                4,
                5,
                3,
                6,
                0, // the launch
                2 << 16 | 1,
                7,
                8,
                0,
                9,
                0,
                10,
                0, // rows without gaps
                2,
                0,
                u32::MAX,
                0, // a scalar
                2 << 16 | 3,
                7,
                8,
                0,
                9,
                0,
                10,
                0,
                64,
                0, // rows with a stride
            ],
        ),
        (|b| b.fence(), 10, vec![]),
        (|b| b.log(), 11, vec![]),
        (|b| b.create_module_from(7, Span { buffer: 1, offset: 2, bytes: 3 }), 12, vec![7, 1, 2, 0, 3, 0]),
    ]
}

/// The writer writes exactly these bytes, and nothing if there is one byte too little room.
#[test]
fn operations_have_their_bytes() {
    for (write, code, body) in operations() {
        let expected = raw(&[(code, &words(&body))]);
        let mut bytes = vec![0xaa; expected.len()];
        let mut writer = BatchWriter::new(&mut bytes).unwrap();
        assert!(writer.is_empty());
        write(&mut writer).unwrap();
        assert_eq!((writer.len(), writer.is_empty()), (1, false));
        assert!(writer.fence().is_err(), "no room is left");
        assert_eq!(writer.finish(), expected.len());
        assert_eq!(bytes, expected, "operation {code}");
        let batch = Batch::decode(&bytes).unwrap();
        assert_eq!((batch.len(), batch.is_empty(), batch.operations().count()), (1, false, 1));
        assert!(vm_paravirt::fuzz::frame(&bytes));

        let mut short = vec![0xaa; expected.len() - 1];
        let mut writer = BatchWriter::new(&mut short).unwrap();
        write(&mut writer).unwrap_err();
        assert_eq!((writer.len(), writer.finish()), (0, HEADER));
        assert_eq!(short[..HEADER], raw(&[]));
    }
    // All operations in one batch, with room to spare.
    let all: Vec<_> = operations().into_iter().map(|(_, code, body)| (code, words(&body))).collect();
    let all: Vec<_> = all.iter().map(|(code, body)| (*code, &body[..])).collect();
    let mut bytes = vec![0xaa; 4096];
    let mut writer = BatchWriter::new(&mut bytes).unwrap();
    operations().iter().for_each(|(write, ..)| write(&mut writer).unwrap());
    let len = writer.finish();
    assert_eq!(bytes[..len], raw(&all));
    assert!(Batch::decode(&raw(&[])).unwrap().is_empty());
    assert!(BatchWriter::new(&mut [0; HEADER - 1]).is_err());
    assert!(BatchWriter::new(&mut [0; HEADER]).is_ok());
}

/// A body that is a word shorter or longer than the operation's is malformed.
#[test]
fn operations_have_their_length() {
    for (_, code, body) in operations() {
        let full = words(&body);
        assert_eq!(wrong(&raw(&[(code, &full)])), None);
        let longer = [&full[..], &[0; 8]].concat();
        let end = HEADER + 8 + full.len();
        assert_eq!(wrong(&raw(&[(code, &longer)])), Some((end, "bytes are left over")), "operation {code}");
        if let Some(shorter) = full.len().checked_sub(8) {
            let (_, what) = wrong(&raw(&[(code, &full[..shorter])])).unwrap();
            assert_eq!(what, "it ends early", "operation {code}");
        }
    }
    let no_length = Some((HEADER, "an operation has no such length"));
    for (len, expected) in [(0, no_length), (4, no_length), (7, no_length), (8, None), (12, no_length)] {
        let mut bytes = raw(&[(10, &[])]);
        bytes.extend([0; 4]);
        let whole = if len == 12 { bytes.len() } else { bytes.len() - 4 };
        bytes.truncate(whole);
        bytes[8..12].copy_from_slice(&(whole as u32).to_le_bytes());
        bytes[HEADER + 4] = len;
        assert_eq!(wrong(&bytes), expected, "{len}");
    }
    // An operation longer than the rest of the batch.
    let mut bytes = raw(&[(10, &[])]);
    bytes[HEADER + 4] = 16;
    assert_eq!(wrong(&bytes), Some((HEADER + 8, "it ends early")));
    assert_eq!(wrong(&raw(&[(0, &[])])), Some((HEADER, "there is no operation of this code")));
    assert_eq!(
        wrong(&raw(&[(10, &[]), (13, &[])])),
        Some((HEADER + 8, "there is no operation of this code"))
    );
}

#[test]
fn reserved_bytes_are_zero() {
    let change = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x80;
        wrong(&bytes).map(|(_, what)| what)
    };
    let module = raw(&[(2, &words(&[7, 5, 0x0403_0201, 5]))]);
    assert_eq!(change(&module, 6), Some("a reserved field is not zero"));
    assert_eq!(change(&module, HEADER + 2), Some("a reserved field is not zero"));
    for padding in HEADER + 21..HEADER + 24 {
        assert_eq!(change(&module, padding), Some("padding is not zero"));
    }
    for code in [3, 6] {
        assert_eq!(
            change(&raw(&[(code, &words(&[7, 0]))]), HEADER + 12),
            Some("a reserved field is not zero")
        );
    }
    assert_eq!(
        change(&raw(&[(4, &words(&[7, 0, 1, 0]))]), HEADER + 15),
        Some("a reserved field is not zero")
    );
    let fill = |value| wrong(&raw(&[(8, &words(&[1, value, 2, 0, 3, 0]))])).map(|(_, what)| what);
    assert_eq!((fill(255), fill(256)), (None, Some("a byte is larger than 255")));
}

/// Numbers that drivers have compiled in.
#[test]
fn numbers_of_the_device_stay() {
    assert_eq!((vm_paravirt::FEATURE_IMPORT, vm_paravirt::FEATURE_WINDOW), (1, 2));
    assert_eq!(vm_paravirt::PCI_ID, (0x1af4, 0x107f));
    let config = vm_paravirt::Config::new(1, 2).with_window(3, 4);
    assert_eq!((config.memory_bytes, config.deadline_us, config.window_bytes, config.port), (1, 2, 3, 4));
}

#[test]
fn headers_are_checked() {
    let bytes = raw(&[(10, &[])]);
    let with = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        wrong(&bytes)
    };
    assert_eq!(with(3, b'c'), Some((0, "it does not begin as a batch")));
    assert_eq!(with(4, 2), Some((4, Batch::OTHER_VERSION)));
    assert_eq!(with(8, 23), Some((8, "its length is not the one that it tells")));
    assert_eq!(with(8, 25), Some((8, "its length is not the one that it tells")));
    assert_eq!(with(12, 2), Some((12, "it tells more operations than it can have")));
    assert_eq!(with(12, 0), Some((HEADER, "bytes are left over")));
    for len in 0..HEADER {
        assert!(wrong(&bytes[..len]).is_some());
    }
}

#[test]
fn counts_have_limits() {
    // As many operations as a batch may have, and one more.
    let fences = |count: usize| raw(&vec![(10, &[][..]); count]);
    assert_eq!(Batch::decode(&fences(MAX_OPERATIONS)).unwrap().operations().count(), MAX_OPERATIONS);
    let too_many = Some((12, "it tells more operations than it can have"));
    assert_eq!(wrong(&fences(MAX_OPERATIONS + 1)), too_many);
    let mut bytes = vec![0; MAX_BATCH_BYTES];
    let mut writer = BatchWriter::new(&mut bytes).unwrap();
    (0..MAX_OPERATIONS).for_each(|_| writer.fence().unwrap());
    writer.fence().unwrap_err();
    assert_eq!(writer.len(), MAX_OPERATIONS);
    writer.clear();
    assert_eq!((writer.len(), writer.is_empty()), (0, true));
    assert_eq!(writer.finish(), HEADER);

    // As many bytes.
    let module = |bytes: usize| raw(&[(2, &[&words(&[7, bytes as u32])[..], &vec![1; bytes]].concat())]);
    let most = MAX_BATCH_BYTES - HEADER - 16;
    assert_eq!(wrong(&module(most)), None);
    assert_eq!(wrong(&module(most + 8)), Some((0, "it is longer than a batch may be")));
    let mut bytes = vec![0; MAX_BATCH_BYTES + 64];
    for (len, fits) in
        [(most, true), (most + 1, false), (MAX_BATCH_BYTES, false), (MAX_BATCH_BYTES + 1, false)]
    {
        let mut writer = BatchWriter::new(&mut bytes).unwrap();
        assert_eq!(writer.create_module(7, &vec![1; len]).is_ok(), fits, "{len}");
    }
    // A batch that goes on has no more room than one that is begun.
    let len = BatchWriter::new(&mut bytes).unwrap().seal();
    let mut writer = BatchWriter::resume(&mut bytes, len).unwrap();
    writer.create_module(7, &vec![1; most + 1]).unwrap_err();
    writer.create_module(7, &vec![1; most]).unwrap();

    // As many ranges of an imported buffer.
    let ranges = |count: usize| vec![Range { address: 0x1000, bytes: 0x1000 }; count];
    let raw_ranges = |count: usize| {
        raw(&[(5, &[words(&[7, count as u32]), words(&[0x1000, 0, 0x1000, 0]).repeat(count)].concat())])
    };
    for (count, fits) in [(0, false), (1, true), (MAX_RANGES, true), (MAX_RANGES + 1, false)] {
        let mut writer = BatchWriter::new(&mut bytes).unwrap();
        assert_eq!(writer.import_buffer(7, &ranges(count)).is_ok(), fits, "{count}");
        let raw = raw_ranges(count);
        let Ok(batch) = Batch::decode(&raw) else {
            assert!(!fits, "{count}");
            continue;
        };
        assert!(fits, "{count}");
        let Some(Ok(Operation::ImportBuffer { buffer: 7, ranges: read })) = batch.operations().next() else {
            panic!("no import");
        };
        assert_eq!((read.len(), read.is_empty()), (count, false));
        assert!(read.iter().eq(ranges(count)));
    }

    // As many arguments of a launch.
    for (count, fits) in [(0, true), (1, true), (MAX_ARGUMENTS, true), (MAX_ARGUMENTS + 1, false)] {
        let mut writer = BatchWriter::new(&mut bytes).unwrap();
        let arguments = vec![Argument::Scalar(3); count];
        assert_eq!(writer.launch(1, 2, [1; 3], &arguments).is_ok(), fits, "{count}");
        let head = words(&[1, 2, 1, 1, 1, count as u32, 0, 0]);
        let raw = raw(&[(9, &[head, words(&[2, 0, 3, 0]).repeat(count)].concat())]);
        assert_eq!(wrong(&raw).is_none(), fits, "{count}");
        if let Some(Ok(Operation::Launch(launch))) =
            Batch::decode(&raw).ok().and_then(|b| b.operations().next())
        {
            assert_eq!((launch.arguments.len(), launch.arguments.is_empty()), (count, count == 0));
            assert_eq!(launch.arguments.count(), count);
        }
    }
}

#[test]
fn views_have_one_to_four_extents() {
    for rank in 0..=5 {
        let extents: Vec<u64> = (1..=rank).collect();
        let view = Argument::view(1, 2, &extents);
        assert_eq!(view.is_ok(), (1..=4).contains(&rank), "{rank}");
        for strides in 0..=5 {
            let strided = Argument::strided(1, 2, &extents, &vec![8; strides]);
            assert_eq!(strided.is_ok(), view.is_ok() && strides as u64 + 1 == rank, "{rank} {strides}");
            if let Ok(Argument::View(strided)) = strided {
                assert_eq!(
                    (strided.extents(), strided.strides()),
                    (&extents[..], Some(&vec![8; strides][..]))
                );
            }
        }
        if let Ok(Argument::View(view)) = view {
            assert_eq!((view.extents(), view.strides()), (&extents[..], None));
        }
        for (kind, strides) in [(1, 0), (3, (rank as usize).saturating_sub(1))] {
            let head = words(&[1, 2, 1, 1, 1, 1, 0, 0, (rank as u32) << 16 | kind, 1, 2, 0]);
            let body = [head, words(&[1, 0]).repeat(rank as usize + strides)].concat();
            let found = wrong(&raw(&[(9, &body)]));
            assert_eq!(found.is_none(), (1..=4).contains(&rank), "{rank} {kind}: {found:?}");
        }
    }
    // A scalar has no rank, and no other kind is one.
    let argument = |kind: u32, reserved: u32| {
        let body = words(&[1, 2, 1, 1, 1, 1, 0, 0, kind, reserved, 3, 0]);
        wrong(&raw(&[(9, &body)])).map(|(_, what)| what)
    };
    assert_eq!(argument(2, 0), None);
    assert_eq!(argument(2, 1), Some("a reserved field is not zero"));
    let neither = Some("an argument is no view and no scalar");
    for kind in [1 << 16 | 2, 0, 4, 1 << 16 | 4] {
        assert_eq!(argument(kind, 0), neither);
    }
    assert_eq!(Argument::f32(-0.0), Argument::Scalar(1 << 31));
    assert_eq!(Argument::f64(-0.0), Argument::Scalar(1 << 63));
    assert_eq!(Argument::i32(-2), Argument::Scalar(0xffff_fffe));
    assert_eq!(Argument::i64(-2), Argument::Scalar(u64::MAX - 1));
}

/// A reply with these results, each a status and a length that it tells, with as many bytes behind.
fn raw_reply(results: &[(u16, u32, usize)]) -> Vec<u8> {
    let mut bytes = b"vmar\x01\0\0\0".to_vec();
    bytes.extend([0; 4]);
    bytes.extend((results.len() as u32).to_le_bytes());
    for (status, told, answer) in results {
        bytes.extend(status.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(told.to_le_bytes());
        bytes.extend(vec![1; *answer]);
    }
    let len = bytes.len() as u32;
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn wrong_reply(bytes: &[u8]) -> Option<(usize, &'static str)> {
    Reply::decode(bytes).err().map(|error| (error.offset, error.what))
}

#[test]
fn replies_are_checked() {
    assert_eq!(wrong_reply(&raw_reply(&[])), None);
    assert_eq!(wrong_reply(&raw_reply(&[(0, 16, 8), (1, 8, 0)])), None);
    let no_length = Some((HEADER, "a result has no such length"));
    for told in [0, 4, 7, 12] {
        assert_eq!(wrong_reply(&raw_reply(&[(0, told, 8)])), no_length, "{told}");
    }
    assert_eq!(wrong_reply(&raw_reply(&[(0, 24, 8)])), Some((HEADER + 8, "it ends early")));
    assert_eq!(wrong_reply(&raw_reply(&[(0, 8, 8)])), Some((HEADER + 8, "bytes are left over")));
    assert_eq!(wrong_reply(&raw_reply(&[(17, 8, 0)])), Some((HEADER, "there is no such status")));
    let change = |at: usize, value: u8| {
        let mut bytes = raw_reply(&[(0, 8, 0)]);
        bytes[at] = value;
        wrong_reply(&bytes)
    };
    assert_eq!(change(0, 0), Some((0, "it does not begin as a reply")));
    assert_eq!(change(4, 2), Some((4, "it has another version of the protocol")));
    assert_eq!(change(6, 17), Some((6, "there is no such status")));
    assert_eq!(change(8, 16), Some((8, "its length is not the one that it tells")));
    assert_eq!(change(12, 2), Some((12, "it tells more results than it can have")));
    assert_eq!(change(HEADER + 2, 1).map(|(_, what)| what), Some("a reserved field is not zero"));
    let many = |count: usize| wrong_reply(&raw_reply(&vec![(0, 8, 0); count]));
    assert_eq!(many(MAX_OPERATIONS), None);
    assert_eq!(many(MAX_OPERATIONS + 1), Some((12, "it tells more results than it can have")));
    let long = |bytes: usize| wrong_reply(&raw_reply(&[(0, bytes as u32 - 16, bytes - 24)]));
    assert_eq!(long(MAX_REPLY_BYTES), None);
    assert_eq!(long(MAX_REPLY_BYTES + 8), Some((0, "it is longer than a reply may be")));
}

#[test]
fn replies_are_written_where_they_have_room() {
    assert_eq!(reply_bytes(0, 0), HEADER);
    assert_eq!(reply_bytes(3, 16), HEADER + 3 * 8 + 16);
    for answer in [0usize, 1, 7, 8, 9] {
        let size = reply_bytes(1, answer.div_ceil(8) * 8);
        let mut bytes = vec![0xaa; size];
        let mut writer = ReplyWriter::new(&mut bytes, Status::Ok).unwrap();
        assert_eq!(writer.room(), size - HEADER);
        writer.result(Status::Ok, &vec![1; answer]).unwrap();
        assert_eq!(writer.room(), 0);
        assert_eq!(writer.finish(), size);
        let reply = Reply::decode(&bytes).unwrap();
        assert_eq!((reply.status(), reply.check(), reply.results().count()), (Status::Ok, Ok(()), 1));
        let mut short = vec![0xaa; size - 1];
        let mut writer = ReplyWriter::new(&mut short, Status::Ok).unwrap();
        writer.result(Status::Ok, &vec![1; answer]).unwrap_err();
        assert_eq!(writer.finish(), HEADER);
        assert_eq!(Reply::decode(&short[..HEADER]).unwrap().results().count(), 0);
    }
    assert!(ReplyWriter::new(&mut [0; HEADER], Status::Ok).is_ok());
    let mut bytes = vec![0; MAX_REPLY_BYTES + 64];
    assert_eq!(ReplyWriter::new(&mut bytes, Status::Ok).unwrap().room(), MAX_REPLY_BYTES - HEADER);
    let mut writer = ReplyWriter::new(&mut bytes, Status::Ok).unwrap();
    writer.result(Status::Ok, b"a").unwrap();
    writer.result(Status::Quota, b"b").unwrap();
    let len = writer.finish();
    assert_eq!(len, reply_bytes(2, 16));
    let read: Vec<_> = Reply::decode(&bytes[..len]).unwrap().results().map(Result::unwrap).collect();
    assert_eq!(read, [(Status::Ok, &b"a\0\0\0\0\0\0\0"[..]), (Status::Quota, b"b\0\0\0\0\0\0\0")]);
    // The first that failed, and a batch that was not begun.
    let mut writer = ReplyWriter::new(&mut bytes, Status::Ok).unwrap();
    for status in [Status::Ok, Status::Range, Status::Skipped] {
        writer.result(status, &[]).unwrap();
    }
    let len = writer.finish();
    assert_eq!(Reply::decode(&bytes[..len]).unwrap().check(), Err((1, Status::Range)));
    let len = ReplyWriter::new(&mut bytes, Status::Malformed).unwrap().finish();
    assert_eq!(Reply::decode(&bytes[..len]).unwrap().check(), Err((0, Status::Malformed)));
}

#[test]
fn texts_are_cut() {
    let info = |name, target| Info {
        name,
        target,
        memory_bytes: 1,
        memory_free: 2,
        deadline_us: 3,
        fuel: 4,
        units: 5,
        lanes: 6,
        block_threads: 7,
        shared_bytes: 8,
        grid: [9, 10, 11],
        modules: 12,
        buffers: 13,
    };
    let long = "x".repeat(MAX_TEXT + 1);
    for (name, target, size) in [("", "", 72), ("a", "", 80), ("abcd", "efgh", 80), ("abcd", "efghi", 88)] {
        let mut bytes = [0; 88];
        assert_eq!(info(name, target).encode(&mut bytes[..size]), Ok(size));
        assert_eq!(Info::decode(&bytes[..size]), Ok(info(name, target)));
        info(name, target).encode(&mut bytes[..size - 1]).unwrap_err();
    }
    let mut bytes = [0; Info::MAX_BYTES];
    assert_eq!(info(&long, &long).encode(&mut bytes), Ok(Info::MAX_BYTES));
    assert_eq!(Info::decode(&bytes), Ok(info(&long[1..], &long[1..])));
    // A text that tells a length above the limit.
    for at in [68, 70] {
        let mut told = [&bytes[..], &[b'x'; 8]].concat();
        told[at] = 1;
        assert_eq!(Info::decode(&told).unwrap_err().what, "a text is too long");
    }
    let mut other = bytes;
    other[72] = 0xff;
    assert_eq!(Info::decode(&other).unwrap_err().what, "a text is not UTF-8");

    let entry = |text| LogEntry { batch: 1, operation: 2, status: Status::Range, text };
    for (text, size) in [("", 16), ("a", 24), ("12345678", 24), ("123456789", 32), (&long, 16 + MAX_TEXT)] {
        assert_eq!(entry(text).bytes(), size);
        let mut bytes = vec![0; size];
        let mut writer = LogWriter::new(&mut bytes);
        writer.entry(&entry(text)).unwrap();
        assert_eq!(writer.finish(), size);
        let read: Vec<_> = LogReader::new(&bytes).collect();
        assert_eq!(read, [Ok(entry(&text[..text.len().min(MAX_TEXT)]))]);
        let mut writer = LogWriter::new(&mut bytes[..size - 1]);
        writer.entry(&entry(text)).unwrap_err();
        assert_eq!(writer.finish(), 0);
        // A truncated entry ends the log.
        let mut short = LogReader::new(&bytes[..size - 1]);
        assert!(short.next().unwrap().is_err());
        assert_eq!(short.next(), None);
    }
    let mut told = vec![b'x'; 16 + MAX_TEXT + 8];
    told[12..16].copy_from_slice(&[0, 0, 1, 2]);
    assert_eq!(LogReader::new(&told).next().unwrap().unwrap_err().what, "a text is too long");
    told[12] = 17;
    assert_eq!(LogReader::new(&told).next().unwrap().unwrap_err().what, "there is no such status");
}
