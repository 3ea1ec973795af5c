//! What a guest asks: batches of operations.

use crate::wire::{Input, Malformed, NoRoom, Output, padded};
use crate::{MAX_ARGUMENTS, MAX_BATCH_BYTES, MAX_OPERATIONS, MAX_RANGES, MAX_RANK, VERSION};

const MAGIC: [u8; 4] = *b"vmab";
const HEADER: usize = 16;
const OPERATION_HEADER: usize = 8;

mod code {
    pub(super) const QUERY: u16 = 1;
    pub(super) const CREATE_MODULE: u16 = 2;
    pub(super) const DESTROY_MODULE: u16 = 3;
    pub(super) const CREATE_BUFFER: u16 = 4;
    pub(super) const IMPORT_BUFFER: u16 = 5;
    pub(super) const DESTROY_BUFFER: u16 = 6;
    pub(super) const COPY: u16 = 7;
    pub(super) const FILL: u16 = 8;
    pub(super) const LAUNCH: u16 = 9;
    pub(super) const FENCE: u16 = 10;
    pub(super) const LOG: u16 = 11;
    pub(super) const CREATE_MODULE_FROM: u16 = 12;
}

const VIEW: u16 = 1;
const SCALAR: u16 = 2;
const STRIDED: u16 = 3;

/// One thing that a guest asks. Numbers of modules and buffers are the guest's choice.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// What the accelerator is and can; answered with an [`Info`](crate::Info).
    Query,
    /// Compiles and loads a module.
    CreateModule {
        /// The number that it gets.
        module: u32,
        /// Kernels in the IR's binary form, or a model in that of graphs.
        code: &'a [u8],
    },
    /// The same with code that lies in a buffer, which may be longer than a batch.
    CreateModuleFrom {
        /// The number that it gets.
        module: u32,
        /// Where the code lies, once all operations before this one have run. It is copied.
        source: Span,
    },
    /// Unloads a module, once the launches of it have run.
    DestroyModule {
        /// Its number.
        module: u32,
    },
    /// Makes a buffer of zeros in the device's memory.
    CreateBuffer {
        /// The number that it gets.
        buffer: u32,
        /// Its length, at least 1.
        bytes: u64,
    },
    /// Makes a buffer of the guest's own memory, which the accelerator reads and writes in place.
    ImportBuffer {
        /// The number that it gets.
        buffer: u32,
        /// The memory, in the order in which it appears in the buffer.
        ranges: Ranges<'a>,
    },
    /// Frees a buffer, once the operations that use it have run.
    DestroyBuffer {
        /// Its number.
        buffer: u32,
    },
    /// Copies between buffers.
    Copy {
        /// Where to.
        target: Span,
        /// Where from; as long as the target.
        source: Span,
    },
    /// Sets bytes.
    Fill {
        /// Which.
        target: Span,
        /// To what.
        value: u8,
    },
    /// Launches a kernel.
    Launch(Launch<'a>),
    /// The batch is answered once all operations before this one, also those of earlier batches, have run.
    Fence,
    /// Takes the oldest entries out of the error log; answered with as many as fit.
    Log,
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer's number.
    pub buffer: u32,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A part of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The module's number.
    pub module: u32,
    /// The kernel's place in the module, from 0.
    pub kernel: u32,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// How often each thread may begin the body of a cancellable loop; 0 for as often as the device allows.
    pub fuel: u64,
    /// The arguments, in the order of the kernel's parameters.
    pub arguments: Arguments<'a>,
}

/// An argument of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// For a view.
    View(View),
    /// For a scalar: its bits, the rest zero.
    Scalar(u64),
}

/// Memory for a view: elements in a buffer, row by row without gaps, or with strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer's number.
    pub buffer: u32,
    /// Where its first element lies, in bytes.
    pub offset: u64,
    extents: [u64; MAX_RANK],
    strides: [u64; MAX_RANK - 1],
    rank: u16,
    strided: bool,
}

impl View {
    /// The extents, slowest dimension first.
    pub fn extents(&self) -> &[u64] {
        self.extents.get(..usize::from(self.rank)).unwrap_or(&[])
    }

    /// The bytes from one element of each dimension but the last to the next, or none where rows lie one behind the other.
    pub fn strides(&self) -> Option<&[u64]> {
        if self.strided { self.strides.get(..usize::from(self.rank).saturating_sub(1)) } else { None }
    }
}

impl Argument {
    /// A view of these extents, slowest dimension first, from byte `offset` of a buffer.
    ///
    /// # Errors
    /// When there are no extents, or more than [`MAX_RANK`].
    pub fn view(buffer: u32, offset: u64, extents: &[u64]) -> Result<Self, NoRoom> {
        let mut fixed = [0; MAX_RANK];
        match fixed.get_mut(..extents.len()) {
            Some(slots) if !extents.is_empty() => slots.copy_from_slice(extents),
            _ => return Err(NoRoom { what: "these extents: a view has 1 to 4" }),
        }
        let (strides, rank) = ([0; MAX_RANK - 1], extents.len() as u16);
        Ok(Self::View(View { buffer, offset, extents: fixed, strides, rank, strided: false }))
    }

    /// The same where rows don't lie one behind the other, with the bytes from one element of each dimension but the last to the next.
    ///
    /// # Errors
    /// As for [`view`](Self::view), and when there are not as many strides as extents but one.
    pub fn strided(buffer: u32, offset: u64, extents: &[u64], strides: &[u64]) -> Result<Self, NoRoom> {
        match Self::view(buffer, offset, extents)? {
            Self::View(mut view) if strides.len() + 1 == extents.len() => {
                view.strides.iter_mut().zip(strides).for_each(|(slot, stride)| *slot = *stride);
                view.strided = true;
                Ok(Self::View(view))
            }
            _ => Err(NoRoom { what: "these strides: each dimension but the last has one" }),
        }
    }

    /// A scalar of type f32.
    pub fn f32(value: f32) -> Self {
        Self::Scalar(value.to_bits().into())
    }

    /// A scalar of type f64.
    pub fn f64(value: f64) -> Self {
        Self::Scalar(value.to_bits())
    }

    /// A scalar of type i32.
    pub fn i32(value: i32) -> Self {
        Self::Scalar(u64::from(value as u32))
    }

    /// A scalar of type i64.
    pub fn i64(value: i64) -> Self {
        Self::Scalar(value as u64)
    }

    fn bytes(&self) -> usize {
        match self {
            Self::View(view) => 16 + 8 * (view.extents().len() + view.strides().unwrap_or(&[]).len()),
            Self::Scalar(_) => 16,
        }
    }
}

/// A batch whose every operation is well formed.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    body: &'a [u8],
    operations: usize,
}

impl<'a> Batch<'a> {
    /// Reads a batch, all of it.
    ///
    /// # Errors
    /// Where it is no batch of this version.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let operations = Self::header(bytes)?;
        let batch = Self { body: bytes.get(HEADER..).unwrap_or(&[]), operations };
        let mut seen = batch.operations();
        for operation in &mut seen {
            operation?;
        }
        seen.input.end()?;
        Ok(batch)
    }

    /// How many operations these bytes tell in their header.
    fn header(bytes: &[u8]) -> Result<usize, Malformed> {
        let mut input = Input::new(bytes, 0);
        if bytes.len() > MAX_BATCH_BYTES {
            return input.bad("it is longer than a batch may be");
        }
        if input.take(4)? != MAGIC {
            return Err(Malformed { offset: 0, what: "it does not begin as a batch" });
        }
        if input.u16()? != VERSION {
            return Err(Malformed { offset: 4, what: Self::OTHER_VERSION });
        }
        input.zero16()?;
        if input.u32()? as usize != bytes.len() {
            return Err(Malformed { offset: 8, what: "its length is not the one that it tells" });
        }
        let operations = input.u32()? as usize;
        if operations > MAX_OPERATIONS || operations > input.left() / OPERATION_HEADER {
            return Err(Malformed { offset: 12, what: "it tells more operations than it can have" });
        }
        Ok(operations)
    }

    /// What is said of a batch of another version.
    pub const OTHER_VERSION: &'static str = "it has another version of the protocol";

    /// How many operations it has.
    pub fn len(&self) -> usize {
        self.operations
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.operations == 0
    }

    /// The operations, in order. None of them is an error.
    pub fn operations(&self) -> Operations<'a> {
        Operations { input: Input::new(self.body, HEADER), left: self.operations }
    }
}

/// The operations of a batch.
#[derive(Clone, Debug)]
pub struct Operations<'a> {
    input: Input<'a>,
    left: usize,
}

impl<'a> Iterator for Operations<'a> {
    type Item = Result<Operation<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let operation = operation(&mut self.input);
        if operation.is_err() {
            self.left = 0;
        }
        Some(operation)
    }
}

fn operation<'a>(input: &mut Input<'a>) -> Result<Operation<'a>, Malformed> {
    let start = *input;
    let code = input.u16()?;
    input.zero16()?;
    let bytes = input.u32()? as usize;
    if bytes < OPERATION_HEADER || !bytes.is_multiple_of(8) {
        return start.bad("an operation has no such length");
    }
    let offset = input.offset();
    let mut body = Input::new(input.take(bytes - OPERATION_HEADER)?, offset);
    let numbered = |body: &mut Input<'a>| {
        let number = body.u32()?;
        body.zero32()?;
        Ok(number)
    };
    let operation = match code {
        code::QUERY => Operation::Query,
        code::CREATE_MODULE => {
            let module = body.u32()?;
            let len = body.u32()? as usize;
            let code = body.take(len)?;
            if body.take(padded(len) - len)?.iter().any(|byte| *byte != 0) {
                return body.bad("padding is not zero");
            }
            Operation::CreateModule { module, code }
        }
        code::DESTROY_MODULE => Operation::DestroyModule { module: numbered(&mut body)? },
        code::CREATE_BUFFER => Operation::CreateBuffer { buffer: numbered(&mut body)?, bytes: body.u64()? },
        code::IMPORT_BUFFER => {
            let buffer = body.u32()?;
            let count = body.u32()? as usize;
            if count == 0 || count > MAX_RANGES {
                return body.bad("a buffer has no such number of ranges");
            }
            Operation::ImportBuffer { buffer, ranges: Ranges { bytes: body.take(count * 16)? } }
        }
        code::DESTROY_BUFFER => Operation::DestroyBuffer { buffer: numbered(&mut body)? },
        code::COPY => {
            let (target, source) = (body.u32()?, body.u32()?);
            let (to, from, bytes) = (body.u64()?, body.u64()?, body.u64()?);
            Operation::Copy {
                target: Span { buffer: target, offset: to, bytes },
                source: Span { buffer: source, offset: from, bytes },
            }
        }
        code::FILL => {
            let (buffer, value) = (body.u32()?, body.u32()?);
            let Ok(value) = u8::try_from(value) else { return body.bad("a byte is larger than 255") };
            Operation::Fill { target: Span { buffer, offset: body.u64()?, bytes: body.u64()? }, value }
        }
        code::LAUNCH => {
            let (module, kernel) = (body.u32()?, body.u32()?);
            let grid = [body.u32()?, body.u32()?, body.u32()?];
            let count = body.u32()? as usize;
            let fuel = body.u64()?;
            if count > MAX_ARGUMENTS {
                return body.bad("a launch has too many arguments");
            }
            let arguments = Arguments { input: body, left: count };
            let mut all = arguments;
            for argument in &mut all {
                argument?;
            }
            body = all.input;
            Operation::Launch(Launch { module, kernel, grid, fuel, arguments })
        }
        code::FENCE => Operation::Fence,
        code::LOG => Operation::Log,
        code::CREATE_MODULE_FROM => {
            let (module, buffer) = (body.u32()?, body.u32()?);
            let source = Span { buffer, offset: body.u64()?, bytes: body.u64()? };
            Operation::CreateModuleFrom { module, source }
        }
        _ => return start.bad("there is no operation of this code"),
    };
    body.end()?;
    Ok(operation)
}

/// The arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a> {
    input: Input<'a>,
    left: usize,
}

impl Arguments<'_> {
    /// How many are left.
    pub fn len(&self) -> usize {
        self.left
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl Iterator for Arguments<'_> {
    type Item = Result<Argument, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let argument = argument(&mut self.input);
        if argument.is_err() {
            self.left = 0;
        }
        Some(argument)
    }
}

fn argument(input: &mut Input<'_>) -> Result<Argument, Malformed> {
    let start = *input;
    let (kind, rank) = (input.u16()?, input.u16()?);
    match (kind, usize::from(rank)) {
        (VIEW | STRIDED, 1..=MAX_RANK) => {
            let (buffer, offset, strided) = (input.u32()?, input.u64()?, kind == STRIDED);
            let (mut extents, mut strides) = ([0; MAX_RANK], [0; MAX_RANK - 1]);
            for extent in extents.iter_mut().take(rank.into()) {
                *extent = input.u64()?;
            }
            for stride in strides.iter_mut().take(if strided { usize::from(rank) - 1 } else { 0 }) {
                *stride = input.u64()?;
            }
            Ok(Argument::View(View { buffer, offset, extents, strides, rank, strided }))
        }
        (SCALAR, 0) => {
            input.zero32()?;
            Ok(Argument::Scalar(input.u64()?))
        }
        _ => start.bad("an argument is no view and no scalar"),
    }
}

/// The ranges of an imported buffer.
#[derive(Clone, Copy, Debug)]
pub struct Ranges<'a> {
    bytes: &'a [u8],
}

impl<'a> Ranges<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.bytes.len() / 16
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range> + use<'a> {
        self.bytes.chunks_exact(16).map(|chunk| {
            let mut words = [[0; 8]; 2];
            words[0].copy_from_slice(&chunk[..8]);
            words[1].copy_from_slice(&chunk[8..]);
            Range { address: u64::from_le_bytes(words[0]), bytes: u64::from_le_bytes(words[1]) }
        })
    }
}

/// Writes a batch into bytes that the caller gives. What does not fit is an error, and the batch stays as it was.
#[derive(Debug)]
pub struct BatchWriter<'a> {
    output: Output<'a>,
    operations: u32,
}

impl<'a> BatchWriter<'a> {
    /// A batch without operations.
    ///
    /// # Errors
    /// When there is not even room for the header.
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, NoRoom> {
        let cap = bytes.len().min(MAX_BATCH_BYTES);
        let mut output = Output::new(bytes.get_mut(..cap).unwrap_or_default());
        if output.room() < HEADER {
            return Err(NoRoom { what: "a batch's header" });
        }
        output.put(&MAGIC);
        output.put(&VERSION.to_le_bytes());
        output.zeros(HEADER - 6);
        Ok(Self { output, operations: 0 })
    }

    /// Goes on with the batch of `len` bytes that another [sealed](Self::seal) here.
    ///
    /// # Errors
    /// When no batch of that length was sealed here.
    pub fn resume(bytes: &'a mut [u8], len: usize) -> Result<Self, NoRoom> {
        let Ok(operations) = Batch::header(bytes.get(..len).unwrap_or_default()) else {
            return Err(NoRoom { what: "a batch that goes on: none was sealed here" });
        };
        let cap = bytes.len().min(MAX_BATCH_BYTES);
        let mut output = Output::new(bytes.get_mut(..cap).unwrap_or_default());
        output.resume(len);
        Ok(Self { output, operations: operations as u32 })
    }

    /// How many operations it has so far.
    pub fn len(&self) -> usize {
        self.operations as usize
    }

    /// Whether it has none so far.
    pub fn is_empty(&self) -> bool {
        self.operations == 0
    }

    /// Forgets all operations.
    pub fn clear(&mut self) {
        self.output.truncate(HEADER);
        self.operations = 0;
    }

    /// Ends the batch and returns its length in bytes.
    pub fn finish(mut self) -> usize {
        self.seal()
    }

    /// Makes the bytes so far a whole batch, and returns its length; more can be added afterwards.
    pub fn seal(&mut self) -> usize {
        let len = self.output.len();
        self.output.patch(8, &(len as u32).to_le_bytes());
        self.output.patch(12, &self.operations.to_le_bytes());
        len
    }

    fn begin(&mut self, code: u16, body: usize, what: &'static str) -> Result<(), NoRoom> {
        let bytes = OPERATION_HEADER + body;
        if self.output.room() < bytes || self.operations as usize >= MAX_OPERATIONS {
            return Err(NoRoom { what });
        }
        self.operations += 1;
        self.output.put(&code.to_le_bytes());
        self.output.zeros(2);
        self.output.put(&(bytes as u32).to_le_bytes());
        Ok(())
    }

    fn words(&mut self, words: &[u32]) {
        words.iter().for_each(|word| self.output.put(&word.to_le_bytes()));
    }

    fn longs(&mut self, longs: &[u64]) {
        longs.iter().for_each(|long| self.output.put(&long.to_le_bytes()));
    }

    /// Adds [`Operation::Query`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn query(&mut self) -> Result<(), NoRoom> {
        self.begin(code::QUERY, 0, "a query")
    }

    /// Adds [`Operation::CreateModule`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn create_module(&mut self, module: u32, code: &[u8]) -> Result<(), NoRoom> {
        let (what, Some(len)) = ("a module", Some(padded(code.len())).filter(|len| *len <= MAX_BATCH_BYTES))
        else {
            return Err(NoRoom { what: "a module" });
        };
        self.begin(code::CREATE_MODULE, 8 + len, what)?;
        self.words(&[module, code.len() as u32]);
        self.output.put(code);
        self.output.zeros(len - code.len());
        Ok(())
    }

    /// Adds [`Operation::CreateModuleFrom`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn create_module_from(&mut self, module: u32, source: Span) -> Result<(), NoRoom> {
        self.begin(code::CREATE_MODULE_FROM, 24, "a module")?;
        self.words(&[module, source.buffer]);
        self.longs(&[source.offset, source.bytes]);
        Ok(())
    }

    /// Adds [`Operation::DestroyModule`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn destroy_module(&mut self, module: u32) -> Result<(), NoRoom> {
        self.begin(code::DESTROY_MODULE, 8, "the end of a module")?;
        self.words(&[module, 0]);
        Ok(())
    }

    /// Adds [`Operation::CreateBuffer`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn create_buffer(&mut self, buffer: u32, bytes: u64) -> Result<(), NoRoom> {
        self.begin(code::CREATE_BUFFER, 16, "a buffer")?;
        self.words(&[buffer, 0]);
        self.longs(&[bytes]);
        Ok(())
    }

    /// Adds [`Operation::ImportBuffer`].
    ///
    /// # Errors
    /// When there is no room, or no or too many ranges.
    pub fn import_buffer(&mut self, buffer: u32, ranges: &[Range]) -> Result<(), NoRoom> {
        if ranges.is_empty() || ranges.len() > MAX_RANGES {
            return Err(NoRoom { what: "these ranges: a buffer has 1 to 4096" });
        }
        self.begin(code::IMPORT_BUFFER, 8 + 16 * ranges.len(), "a buffer of the guest's memory")?;
        self.words(&[buffer, ranges.len() as u32]);
        ranges.iter().for_each(|range| self.longs(&[range.address, range.bytes]));
        Ok(())
    }

    /// Adds [`Operation::DestroyBuffer`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn destroy_buffer(&mut self, buffer: u32) -> Result<(), NoRoom> {
        self.begin(code::DESTROY_BUFFER, 8, "the end of a buffer")?;
        self.words(&[buffer, 0]);
        Ok(())
    }

    /// Adds [`Operation::Copy`]: `bytes` bytes, from `(buffer, offset)` to `(buffer, offset)`.
    ///
    /// # Errors
    /// When there is no room.
    pub fn copy(&mut self, target: (u32, u64), source: (u32, u64), bytes: u64) -> Result<(), NoRoom> {
        self.begin(code::COPY, 32, "a copy")?;
        self.words(&[target.0, source.0]);
        self.longs(&[target.1, source.1, bytes]);
        Ok(())
    }

    /// Adds [`Operation::Fill`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn fill(&mut self, target: Span, value: u8) -> Result<(), NoRoom> {
        self.begin(code::FILL, 24, "a fill")?;
        self.words(&[target.buffer, value.into()]);
        self.longs(&[target.offset, target.bytes]);
        Ok(())
    }

    /// Adds [`Operation::Launch`] with as much fuel as the device allows.
    ///
    /// # Errors
    /// When there is no room, or too many arguments.
    pub fn launch(
        &mut self,
        module: u32,
        kernel: u32,
        grid: [u32; 3],
        arguments: &[Argument],
    ) -> Result<(), NoRoom> {
        self.launch_with_fuel(module, kernel, grid, 0, arguments)
    }

    /// Adds [`Operation::Launch`].
    ///
    /// # Errors
    /// When there is no room, or too many arguments.
    pub fn launch_with_fuel(
        &mut self,
        module: u32,
        kernel: u32,
        grid: [u32; 3],
        fuel: u64,
        arguments: &[Argument],
    ) -> Result<(), NoRoom> {
        if arguments.len() > MAX_ARGUMENTS {
            return Err(NoRoom { what: "more than 64 arguments" });
        }
        let body = 32 + arguments.iter().map(Argument::bytes).sum::<usize>();
        self.begin(code::LAUNCH, body, "a launch")?;
        self.words(&[module, kernel, grid[0], grid[1], grid[2], arguments.len() as u32]);
        self.longs(&[fuel]);
        for argument in arguments {
            match argument {
                Argument::View(view) => {
                    let kind = if view.strided { STRIDED } else { VIEW };
                    self.output.put(&kind.to_le_bytes());
                    self.output.put(&view.rank.to_le_bytes());
                    self.words(&[view.buffer]);
                    self.longs(&[view.offset]);
                    self.longs(view.extents());
                    self.longs(view.strides().unwrap_or(&[]));
                }
                Argument::Scalar(bits) => {
                    self.output.put(&SCALAR.to_le_bytes());
                    self.output.zeros(6);
                    self.longs(&[*bits]);
                }
            }
        }
        Ok(())
    }

    /// Adds [`Operation::Fence`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn fence(&mut self) -> Result<(), NoRoom> {
        self.begin(code::FENCE, 0, "a fence")
    }

    /// Adds [`Operation::Log`].
    ///
    /// # Errors
    /// When there is no room.
    pub fn log(&mut self) -> Result<(), NoRoom> {
        self.begin(code::LOG, 0, "a look at the log")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_goes_on_where_it_was_sealed() {
        let (mut whole, mut parts) = ([0xaa; 256], [0xaa; 256]);
        let mut writer = BatchWriter::new(&mut whole).unwrap();
        writer.create_buffer(1, 64).unwrap();
        writer.fence().unwrap();
        let bytes = writer.finish();

        let mut writer = BatchWriter::new(&mut parts).unwrap();
        writer.create_buffer(1, 64).unwrap();
        let len = writer.seal();
        let mut writer = BatchWriter::resume(&mut parts, len).unwrap();
        assert_eq!(writer.len(), 1);
        writer.fence().unwrap();
        assert_eq!(writer.finish(), bytes);
        assert_eq!(parts[..bytes], whole[..bytes]);
        for len in [0, len, bytes + 8, 300] {
            assert!(BatchWriter::resume(&mut parts, len).is_err(), "{len}");
        }
    }
}
