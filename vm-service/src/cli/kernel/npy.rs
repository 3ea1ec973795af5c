//! NumPy's `.npy` files: a header that says what the elements are, then the elements.
//!
//! The format is NumPy's NEP 1: the bytes `\x93NUMPY`, a version, the header's length, and the header, a Python
//! dictionary with `descr`, `fortran_order` and `shape`. Versions 1 to 3 are read, version 1 is written. A file is
//! untrusted: its header is bounded, and must fit the file's length before memory is taken for the elements.
//!
//! What NumPy has no name for is kept as its bytes: bf16 as `V2`, and the FP8 types as `V1`. In Python,
//! `numpy.load("y.npy").view(ml_dtypes.bfloat16)` makes numbers of them.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;
use vm_ir::Scalar;
use vm_ir::interp::Tensor;
use vm_ir::limits::{MAX_EXTENT, MAX_RANK};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The longest header that is read; NumPy's own for an array of four dimensions has 118 bytes.
const MAX_HEADER: usize = 4096;

/// Why a `.npy` file can't be read or written.
#[derive(Debug, Error)]
pub(crate) enum NpyError {
    /// The file can't be accessed.
    #[error("{path} can't be {what}: {source}; check the path and its permissions")]
    Io {
        /// The file.
        path: PathBuf,
        /// Read or written.
        what: &'static str,
        /// What the system answered.
        source: io::Error,
    },
    /// It is no array that can be used.
    #[error("{path} {what}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
}

/// Reads an array of `element`s.
///
/// # Errors
/// When the file can't be read, is not an array, or is one of other elements.
pub(crate) fn read(path: &Path, element: Scalar) -> Result<Tensor, NpyError> {
    let tell = |bad| match bad {
        Bad::Io(source) => NpyError::Io { path: path.into(), what: "read", source },
        Bad::Format(what) => NpyError::Format { path: path.into(), what },
    };
    let open = || {
        // A FIFO would be waited for.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let data = file.metadata()?;
        Ok((file, data))
    };
    let (mut file, data) = open().map_err(|error| tell(Bad::Io(error)))?;
    if !data.is_file() {
        let what = "is no regular file; name a file that numpy.save wrote";
        return Err(tell(Bad::Format(what.into())));
    }
    read_from(&mut file, data.len(), element).map_err(tell)
}

/// Reads an array from a file of `length` bytes.
fn read_from(file: &mut impl io::Read, length: u64, element: Scalar) -> Result<Tensor, Bad> {
    let header = read_header(file)?;
    let Header { shape, .. } = &header;
    check_elements(&header.descr, element).map_err(Bad::Format)?;
    let wrong = |what: String| Err(Bad::Format(what));
    if header.fortran_order {
        return wrong("is in Fortran order; save numpy.ascontiguousarray(a) instead".into());
    }
    if shape.len() > MAX_RANK || shape.iter().any(|extent| *extent > MAX_EXTENT) {
        return wrong(format!(
            "has the shape {shape:?}; a view has at most {MAX_RANK} dimensions of at most 2^40"
        ));
    }
    let there = length.saturating_sub(header.bytes);
    let size = u64::from(element.bytes());
    let bytes = shape.iter().try_fold(size, |bytes, extent| bytes.checked_mul(*extent));
    let Some(bytes) = bytes.filter(|bytes| *bytes == there) else {
        return wrong(format!(
            "has {there} bytes behind its header, which are not the elements of its shape {shape:?}; save it again"
        ));
    };
    let mut elements = Vec::new();
    if elements.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).is_err() {
        return wrong(format!("has {bytes} bytes, more than this process can hold; take a part of it"));
    }
    file.take(bytes).read_to_end(&mut elements)?;
    if elements.len() as u64 != bytes {
        return wrong("got shorter while it was read; save it again".into());
    }
    Ok(Tensor { element, extents: header.shape, bytes: elements })
}

/// Writes an array, all of it or nothing ([`vm_files::replace`]).
///
/// # Errors
/// When the file can't be written.
pub(crate) fn write(path: &Path, tensor: &Tensor) -> Result<(), NpyError> {
    let io = |source| NpyError::Io { path: path.into(), what: "written", source };
    vm_files::replace(path, |file| write_to(file, tensor)).map_err(io)
}

fn write_to(file: &File, tensor: &Tensor) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    file.write_all(&header(tensor))?;
    file.write_all(&tensor.bytes)?;
    file.flush()
}

/// What NumPy calls the elements, as it is written.
fn descr(element: Scalar) -> &'static str {
    match element {
        Scalar::Bool => "|b1",
        Scalar::I8 => "|i1",
        Scalar::I16 => "<i2",
        Scalar::I32 => "<i4",
        Scalar::I64 => "<i8",
        Scalar::F16 => "<f2",
        Scalar::F32 | Scalar::Tf32 => "<f4",
        Scalar::F64 => "<f8",
        Scalar::Bf16 => "|V2",
        Scalar::F8E4M3 | Scalar::F8E5M2 => "|V1",
    }
}

/// What else the elements may be called. Integers carry no sign, so either will do.
fn others(element: Scalar) -> &'static [&'static str] {
    match element {
        Scalar::I8 => &["|u1", "|b1"],
        Scalar::I16 => &["<u2"],
        Scalar::I32 => &["<u4"],
        Scalar::I64 => &["<u8"],
        Scalar::Bf16 => &["<V2", "<u2", "<i2"],
        Scalar::F8E4M3 | Scalar::F8E5M2 => &["<V1", "|u1", "|i1", "<f1"],
        _ => &[],
    }
}

fn check_elements(found: &str, element: Scalar) -> Result<(), String> {
    if found == descr(element) || others(element).contains(&found) {
        return Ok(());
    }
    if found.starts_with('>') {
        return Err(format!(
            "has big-endian elements ({found}); save a.astype(a.dtype.newbyteorder(\"<\")) instead"
        ));
    }
    let wanted = descr(element);
    Err(format!(
        "has elements of {found:?}, the view is of {element}, which is {wanted:?}; save it with that dtype"
    ))
}

fn header(tensor: &Tensor) -> Vec<u8> {
    let extents: Vec<String> = tensor.extents.iter().map(u64::to_string).collect();
    // A Python tuple of one has a comma behind it.
    let comma = if extents.len() == 1 { "," } else { "" };
    let mut text = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': ({}{comma}), }}",
        descr(tensor.element),
        extents.join(", ")
    );
    // The elements begin at a multiple of 64 bytes.
    while !(MAGIC.len() + 4 + text.len() + 1).is_multiple_of(64) {
        text.push(' ');
    }
    text.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    // At most four extents of 20 digits: far below 64 KiB.
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.into_bytes());
    bytes
}

#[derive(Debug, PartialEq, Eq)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<u64>,
    /// Bytes of the file before the elements.
    bytes: u64,
}

#[derive(Debug)]
enum Bad {
    Io(io::Error),
    Format(String),
}

impl From<io::Error> for Bad {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Format("ends within its header; save it again".into()),
            _ => Self::Io(error),
        }
    }
}

fn read_header(file: &mut impl io::Read) -> Result<Header, Bad> {
    let mut start = [0; 8];
    file.read_exact(&mut start)?;
    if !start.starts_with(MAGIC) {
        return Err(Bad::Format("is no .npy file; write it with numpy.save".into()));
    }
    let (length, before) = match start[6] {
        1 => {
            let mut length = [0; 2];
            file.read_exact(&mut length)?;
            (usize::from(u16::from_le_bytes(length)), 10)
        }
        2 | 3 => {
            let mut length = [0; 4];
            file.read_exact(&mut length)?;
            (usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX), 12)
        }
        other => return Err(Bad::Format(format!("is of version {other}; versions 1 to 3 are read"))),
    };
    if length > MAX_HEADER {
        return Err(Bad::Format(format!("has a header of {length} bytes; at most {MAX_HEADER} are read")));
    }
    let mut text = vec![0; length];
    file.read_exact(&mut text)?;
    let text = String::from_utf8(text)
        .map_err(|_| Bad::Format("has a header that is not text; save it again".into()))?;
    let mut header = parse(&text).ok_or_else(|| {
        Bad::Format("has a header that is not of descr, fortran_order and shape; save a plain array".into())
    })?;
    header.bytes = before + length as u64;
    Ok(header)
}

/// Reads the dictionary: each of the three keys once, in any order, and nothing else.
fn parse(text: &str) -> Option<Header> {
    let mut rest = Rest(text.trim());
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    rest.eat("{")?;
    while rest.eat("}").is_none() {
        let key = rest.string()?;
        rest.eat(":")?;
        let fresh = match key {
            "descr" => descr.replace(rest.string()?.to_owned()).is_none(),
            "fortran_order" => fortran_order.replace(rest.boolean()?).is_none(),
            "shape" => shape.replace(rest.tuple()?).is_none(),
            _ => false,
        };
        if !fresh {
            return None;
        }
        if rest.eat(",").is_none() {
            rest.eat("}")?;
            break;
        }
    }
    rest.0.is_empty().then_some(())?;
    Some(Header { descr: descr?, fortran_order: fortran_order?, shape: shape?, bytes: 0 })
}

/// What is left of a header's text.
struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    fn eat(&mut self, token: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(token)?.trim_start();
        Some(())
    }

    fn string(&mut self) -> Option<&'a str> {
        let quote = self.0.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (inside, after) = self.0.get(1..)?.split_once(quote)?;
        self.0 = after.trim_start();
        (!inside.contains('\\')).then_some(inside)
    }

    fn boolean(&mut self) -> Option<bool> {
        if self.eat("True").is_some() {
            return Some(true);
        }
        self.eat("False").map(|()| false)
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        self.eat("(")?;
        let mut extents = Vec::new();
        while self.eat(")").is_none() {
            let digits = self.0.find(|c: char| !c.is_ascii_digit())?;
            extents.push(self.0.get(..digits)?.parse().ok()?);
            self.0 = self.0.get(digits..)?.trim_start();
            if self.eat(",").is_none() {
                self.eat(")")?;
                break;
            }
        }
        Some(extents)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers() {
        let check = |text: &str, expect: Option<(&str, bool, &[u64])>| {
            let got = parse(text).map(|header| (header.descr, header.fortran_order, header.shape));
            let expect = expect.map(|(descr, order, shape)| (descr.to_owned(), order, shape.to_vec()));
            assert_eq!(got, expect, "{text}");
        };
        fn f4(shape: &[u64]) -> Option<(&str, bool, &[u64])> {
            Some(("<f4", false, shape))
        }
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n", f4(&[3, 4]));
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", f4(&[3]));
        check("{\"shape\":(), 'descr':'<f4','fortran_order':False}", f4(&[]));
        check("{'descr': '<f4', 'fortran_order': True, 'shape': (0, 1,), }", Some(("<f4", true, &[0, 1])));
        check("", None);
        check("{", None);
        check("{}", None);
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)} x", None);
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", None);
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", None);
        check("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'shape': (3,)}", None);
        check("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}", None);
        check("{'descr': '<f4', 'fortran_order': False}", None);
    }

    #[test]
    fn arrays_survive_a_round_trip_and_start_at_64_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        for &element in Scalar::ALL.iter().filter(|element| element.in_memory()) {
            for extents in [&[5][..], &[2, 3], &[0], &[1, 2, 1, 3]] {
                let tensor = Tensor::from_f64s(
                    element,
                    extents,
                    (0..).map(f64::from).take(extents.iter().product::<u64>() as usize),
                );
                write(&path, &tensor).unwrap();
                assert_eq!(read(&path, element).unwrap(), tensor);
                let length = fs::metadata(&path).unwrap().len();
                assert_eq!((length - tensor.bytes.len() as u64) % 64, 0);
            }
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let error = read(&path, Scalar::F32).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }

    #[test]
    fn hostile_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        let file = |version: u8, header: &str, elements: usize| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend([version, 0]);
            match version {
                1 => bytes.extend((header.len() as u16).to_le_bytes()),
                _ => bytes.extend((header.len() as u32).to_le_bytes()),
            }
            bytes.extend(header.bytes());
            bytes.resize(bytes.len() + elements, 0);
            bytes
        };
        let of = |descr: &str, shape: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}")
        };
        let check = |bytes: Vec<u8>, expect: &str| {
            fs::write(&path, bytes).unwrap();
            match (read(&path, Scalar::F32), expect) {
                (Ok(_), "") => {}
                (Err(error), expect) if !expect.is_empty() => {
                    assert!(error.to_string().contains(expect), "{error}, not {expect}")
                }
                (result, expect) => panic!("{result:?}, not {expect}"),
            }
        };
        check(file(1, &of("<f4", "(2,)"), 8), "");
        check(file(2, &of("<f4", "(2,)"), 8), "");
        check(file(3, &of("<f4", "(2,)"), 8), "");
        check(vec![], "ends within its header");
        check(b"PK\x03\x04 a zip file".to_vec(), "is no .npy file");
        check(file(9, "", 0), "version 9");
        check(file(2, &" ".repeat(5000), 0), "header of 5000 bytes");
        check([&file(1, "", 0)[..8], &[0xff, 0xff]].concat(), "header of 65535 bytes");
        check([&file(1, "", 0)[..8], &[9, 0], b"{"].concat(), "ends within its header");
        check(file(1, &of("<f4", "(2,)"), 7), "not the elements of its shape [2]");
        check(file(1, &of("<f4", "(2,)"), 9), "not the elements of its shape [2]");
        check(file(1, &of("<f4", "(1099511627776, 1099511627776)"), 8), "not the elements");
        check(file(1, &of("<f4", "(1099511627777,)"), 8), "at most 4 dimensions of at most 2^40");
        check(file(1, &of("<f4", "(1, 1, 1, 1, 1)"), 4), "at most 4 dimensions");
        check(file(1, &of(">f4", "(2,)"), 8), "big-endian");
        check(
            file(1, &of("<f8", "(1,)"), 8),
            "has elements of \"<f8\", the view is of f32, which is \"<f4\"",
        );
        check(file(1, &of("<f4", "(2,)").replace("False", "True"), 8), "Fortran order");
        check(file(1, "{'descr': [('a', '<f4')]}", 8), "save a plain array");
        assert!(read(dir.path(), Scalar::F32).is_err());
        assert!(
            read(&dir.path().join("none"), Scalar::F32).unwrap_err().to_string().contains("can't be read")
        );
    }

    proptest! {
        #[test]
        fn mutated_files_are_read_or_refused(
            changes in proptest::collection::vec((0usize..140, any::<u8>()), 0..6),
            cut in 0usize..160,
        ) {
            let tensor = Tensor::zeros(Scalar::F32, &[2, 2]);
            let mut bytes = [header(&tensor), tensor.bytes].concat();
            for (at, value) in changes {
                let place = at % bytes.len();
                bytes[place] = value;
            }
            bytes.truncate(cut);
            let length = bytes.len() as u64;
            if let Ok(tensor) = read_from(&mut bytes.as_slice(), length, Scalar::F32) {
                prop_assert_eq!(tensor.extents.iter().product::<u64>() * 4, tensor.bytes.len() as u64);
            }
        }

        #[test]
        fn no_header_panics(text in "[{}'\":,()0-9a-zA-Z<| ]{0,80}") {
            let _ = parse(&text);
        }
    }
}
