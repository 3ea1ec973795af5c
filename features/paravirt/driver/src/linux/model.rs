//! Models, which an NPU runs.

use std::fmt::Write as _;
use std::string::String;
use std::vec;
use std::vec::Vec;

use thiserror::Error;
use vm_paravirt::{Argument, BatchWriter, LogReader, NoRoom, Span, Status};

use super::{Part, Stream, Window};
use crate::{Error, Frame, Transport as _};

/// The module, of which a stream has this one.
const MODULE: u32 = 1;
/// The buffer with the module's code. Behind it are those of the inputs, then those of the outputs.
const CODE: u32 = 0;

/// An input or an output of a model, as its graph has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Its elements, all dimensions together.
    pub elements: u64,
    /// Bytes of each.
    pub element_bytes: u64,
}

impl Array {
    fn bytes(self) -> Result<u64, Error> {
        self.elements.checked_mul(self.element_bytes).ok_or(Error::WindowFull)
    }
}

/// A model on an NPU that the host shares, with its inputs and outputs in the window. Dropping it releases them.
///
/// ```no_run
/// use vm_paravirt_guest::linux::{Array, Device, Model};
///
/// # let (code, x) = ([0; 64], [0; 256]);
/// let device = Device::find()?;
/// let row = Array { elements: 64, element_bytes: 4 };
/// let mut model = Model::load(device.connect()?, &device.window()?, &code, &[row], &[row])?;
/// model.set_input(0, &x)?;
/// model.run()?;
/// let y = model.output(0)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Model {
    stream: Stream,
    inputs: Vec<(Array, Part)>,
    outputs: Vec<(Array, Part)>,
}

/// Why a model could not be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{error}{}{log}", if .log.is_empty() { "" } else { ": " })]
pub struct ModelError {
    /// What went wrong.
    pub error: Error,
    /// What the device's error log says of it.
    pub log: String,
}

impl From<Error> for ModelError {
    fn from(error: Error) -> Self {
        Self { error, log: String::new() }
    }
}

impl From<NoRoom> for ModelError {
    fn from(error: NoRoom) -> Self {
        Error::from(error).into()
    }
}

impl Model {
    /// Has the NPU compile a graph in its binary form (`vm_graph::encode`), whose inputs and outputs are these. The stream is the model's
    /// own from then on.
    ///
    /// # Errors
    /// [`Error::WindowFull`] where the window has no room for the code, or for its arrays; [`Error::Status`] where the device refuses it.
    pub fn load(
        stream: Stream,
        window: &Window,
        code: &[u8],
        inputs: &[Array],
        outputs: &[Array],
    ) -> Result<Self, ModelError> {
        let part = |array: &Array| Ok((*array, window.take(array.bytes()?)?));
        let inputs = inputs.iter().map(part).collect::<Result<Vec<_>, Error>>()?;
        let outputs = outputs.iter().map(part).collect::<Result<Vec<_>, Error>>()?;
        let mut model = Self { stream, inputs, outputs };
        let bytes = code.len() as u64;
        let source = window.take(bytes)?;
        source.write(0, code)?;
        let range = source.range(0, bytes)?;
        let ranges = model.parts().map(|(array, part)| part.range(0, array.bytes()?));
        let ranges = ranges.collect::<Result<Vec<_>, Error>>()?;
        model.batch(|batch| {
            batch.import_buffer(CODE, &[range])?;
            batch.create_module_from(MODULE, Span { buffer: CODE, offset: 0, bytes })?;
            batch.destroy_buffer(CODE)?;
            for (buffer, range) in (CODE + 1..).zip(ranges) {
                batch.import_buffer(buffer, &[range])?;
            }
            batch.fence()
        })?;
        Ok(model)
    }

    /// Writes an input, from its first element on, little-endian.
    ///
    /// # Errors
    /// [`Error::Window`] where there is no such input, or it is shorter.
    pub fn set_input(&self, number: usize, bytes: &[u8]) -> Result<(), Error> {
        let (_, part) = self.inputs.get(number).ok_or(Error::Window)?;
        part.write(0, bytes)
    }

    /// Runs it, and waits for its end.
    ///
    /// # Errors
    /// [`Error::Status`] with [`Status::Deadline`] where it took too long; [`Error::NeedsReset`] where the host had to end its worker:
    /// a model is then loaded over a new stream.
    pub fn run(&mut self) -> Result<(), ModelError> {
        let views = (CODE + 1..).zip(self.parts());
        let views = views.map(|(buffer, (array, _))| Argument::view(buffer, 0, &[array.elements]));
        let views = views.collect::<Result<Vec<_>, NoRoom>>()?;
        self.batch(|batch| {
            batch.launch(MODULE, 0, [1; 3], &views)?;
            batch.fence()
        })
    }

    /// Reads an output, as the last run left it.
    ///
    /// # Errors
    /// [`Error::Window`] where there is no such output.
    pub fn output(&self, number: usize) -> Result<Vec<u8>, Error> {
        let (array, part) = self.outputs.get(number).ok_or(Error::Window)?;
        let mut bytes = vec![0; array.bytes()? as usize];
        part.read(0, &mut bytes)?;
        Ok(bytes)
    }

    fn parts(&self) -> impl Iterator<Item = &(Array, Part)> {
        self.inputs.iter().chain(&self.outputs)
    }

    /// Does a batch, all of which must succeed.
    fn batch(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    ) -> Result<(), ModelError> {
        let frame = self.call(fill)?;
        let Err((operation, status)) = frame.reply()?.check() else { return Ok(()) };
        let mut log = String::new();
        // Where the context is lost there may be nobody left to tell.
        if status != Status::Lost
            && let Ok(frame) = self.call(|batch| batch.log())
            && let Some(Ok((_, answer))) = frame.reply()?.results().next()
        {
            for entry in LogReader::new(answer).flatten() {
                let between = if log.is_empty() { "" } else { "; " };
                // A string takes all that is written to it.
                let _ = write!(log, "{between}{}", entry.text);
            }
        }
        Err(ModelError { error: Error::Status { operation, status }, log })
    }

    fn call(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    ) -> Result<Frame<Vec<u8>>, Error> {
        let mut frame = self.stream.frame();
        let mut batch = frame.batch()?;
        fill(&mut batch)?;
        let bytes = batch.finish();
        self.stream.call(frame, bytes)
    }
}

impl Drop for Model {
    /// Its parts of the window are others' when nothing lies over them any more.
    fn drop(&mut self) {
        let buffers = CODE + 1..CODE + 1 + self.parts().count() as u32;
        // A stream that has ended has none.
        let _ = self.call(|batch| {
            buffers.clone().try_for_each(|buffer| batch.destroy_buffer(buffer))?;
            batch.fence()
        });
    }
}
