//! How an operation ended.

use thiserror::Error;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// How an operation, or a batch, ended. The codes are the protocol's and never reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
        #[repr(u16)]
        pub enum Status {
            $($(#[$doc])* #[error($text)] $name = $code,)*
        }

        impl Status {
            /// The status of a code; `None` for one that this version does not know.
            pub fn from_code(code: u16) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its code.
            pub fn code(self) -> u16 {
                self as u16
            }
        }

        #[cfg(test)]
        pub(crate) const ALL: &[Status] = &[$(Status::$name),*];
    };
}

statuses! {
    /// It is done, or queued behind what came before.
    Ok = 0, "done";
    /// It was not begun: an earlier operation of the batch failed.
    Skipped = 1, "not begun, as an earlier operation of the batch failed";
    /// The batch is no frame of this protocol.
    Malformed = 2, "the batch is malformed";
    /// The batch has another version.
    Version = 3, "the batch has another version of the protocol";
    /// The reply does not fit what the driver gave for it.
    ReplyRoom = 4, "the reply needs more room";
    /// The device has no such operation.
    Unsupported = 5, "the device does not have this operation";
    /// The number is that of another module or buffer.
    NumberTaken = 6, "the number is taken";
    /// No module, kernel or buffer has the number.
    NoSuch = 7, "there is no such module, kernel or buffer";
    /// A range does not lie in its buffer, or in the guest's memory.
    Range = 8, "a range lies outside its buffer or the guest's memory";
    /// A quota of the guest would be passed.
    Quota = 9, "a quota would be passed";
    /// The device's memory is full.
    OutOfMemory = 10, "the device's memory is full";
    /// The module does not decode, is not valid, or can't be compiled.
    Module = 11, "the module is refused";
    /// The arguments or the grid do not fit the kernel.
    Arguments = 12, "the arguments or the grid do not fit the kernel";
    /// A launch took longer than its guest may, or might without that it could be stopped.
    Deadline = 13, "a launch passed its deadline and was stopped, or is too long to be begun";
    /// A thread of a launch took more iterations of its loops than it may.
    OutOfFuel = 14, "a launch was out of fuel and was stopped";
    /// The device failed.
    Device = 15, "the device failed";
    /// The device's context is lost: reset the device.
    Lost = 16, "the device's context is lost: reset the device";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_lead_back() {
        for status in ALL {
            assert_eq!(Status::from_code(status.code()), Some(*status));
        }
        assert_eq!(Status::from_code(ALL.len() as u16), None);
    }
}
