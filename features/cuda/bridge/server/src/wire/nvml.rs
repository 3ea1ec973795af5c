//! Functions of NVML that the server's NVML answers: a line each. They change nothing, and tell nothing of processes.
//!
//! What is asked is the function's number and what each of its parameters passes; what is answered the function's result, and what its pointers point
//! to then.

use super::{Malformed, Reader, put, put_bytes};
use Parameter::{Array, Bytes, Count, Device, List, Number, Sized, Version};

/// The most bytes of a question, and of an answer.
pub const MOST: usize = 16 << 10;
/// The most words that are passed: as many as registers pass.
pub const WORDS: usize = 6;

/// What a function has of its caller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parameter {
    /// The handle of a device, which crosses as its UUID.
    Device,
    /// A number, and the greatest that it may be.
    Number(u64),
    /// A pointer to so many bytes, which are read and written, as with all that follow.
    Bytes(usize),
    /// A pointer to a structure that begins with its version: its length, and above that its number. It may be one of these.
    Version(&'static [u32]),
    /// A pointer, and a number: how many bytes there are, of which so many cross.
    Sized(usize),
    /// A pointer to a number: how many items there are behind the pointer that follows, of which so many cross.
    Count(u32),
    /// A pointer to items of so many bytes, as many as the [`Count`] before it says; or none.
    List(usize),
    /// A pointer to items of so many bytes, as many as the [`Number`] before it says.
    Array(usize),
}

/// A function.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its name.
    pub name: &'static str,
    /// What it takes.
    pub parameters: &'static [Parameter],
}

const fn function(name: &'static str, parameters: &'static [Parameter]) -> Function {
    Function { name, parameters }
}

/// One of an enumeration, or of a few parts of the device: NVML says which of these there are.
const KIND: Parameter = Number(63);
/// `unsigned int`.
const ANY: Parameter = Number(u32::MAX as u64);
/// `unsigned int *`, or a pointer to an enumeration.
const TO: Parameter = Bytes(4);
/// `unsigned long long *`.
const LONG: Parameter = Bytes(8);
/// A text, and the room for it.
const TEXT: Parameter = Sized(256);

/// All of them. Their numbers are their places here.
pub const FUNCTIONS: &[Function] = &[
    // The system.
    function("nvmlSystemGetConfComputeCapabilities", &[Bytes(8)]),
    function("nvmlSystemGetConfComputeGpusReadyState", &[TO]),
    function("nvmlSystemGetConfComputeSettings", &[Version(&[0x0100_0014])]),
    function("nvmlSystemGetConfComputeState", &[Bytes(12)]),
    function("nvmlSystemGetDriverBranch", &[Version(&[0x0100_0054]), Number(80)]),
    function("nvmlSystemGetNvlinkBwMode", &[TO]),
    // What a device is.
    function("nvmlDeviceGetAddressingMode", &[Device, Version(&[0x0100_0008])]),
    function("nvmlDeviceGetArchitecture", &[Device, TO]),
    function("nvmlDeviceGetAttributes", &[Device, Bytes(40)]),
    function("nvmlDeviceGetAttributes_v2", &[Device, Bytes(40)]),
    function("nvmlDeviceGetBAR1MemoryInfo", &[Device, Bytes(24)]),
    function("nvmlDeviceGetBoardId", &[Device, TO]),
    function("nvmlDeviceGetBoardPartNumber", &[Device, TEXT]),
    function("nvmlDeviceGetBrand", &[Device, TO]),
    function("nvmlDeviceGetBusType", &[Device, TO]),
    function("nvmlDeviceGetC2cModeInfoV", &[Device, TO]),
    function("nvmlDeviceGetCapabilities", &[Device, Version(&[0x0100_0008])]),
    function("nvmlDeviceGetDisplayActive", &[Device, TO]),
    function("nvmlDeviceGetDisplayMode", &[Device, TO]),
    function("nvmlDeviceGetDriverModel", &[Device, TO, TO]),
    function("nvmlDeviceGetDriverModel_v2", &[Device, TO, TO]),
    function("nvmlDeviceGetGpuOperationMode", &[Device, TO, TO]),
    function("nvmlDeviceGetGspFirmwareMode", &[Device, TO, TO]),
    function("nvmlDeviceGetGspFirmwareVersion", &[Device, Bytes(64)]),
    function("nvmlDeviceGetInforomConfigurationChecksum", &[Device, TO]),
    function("nvmlDeviceGetInforomImageVersion", &[Device, TEXT]),
    function("nvmlDeviceGetInforomVersion", &[Device, KIND, TEXT]),
    function("nvmlDeviceGetIrqNum", &[Device, TO]),
    function("nvmlDeviceGetMaxMigDeviceCount", &[Device, TO]),
    function("nvmlDeviceGetMemoryBusWidth", &[Device, TO]),
    function("nvmlDeviceGetMigMode", &[Device, TO, TO]),
    function("nvmlDeviceGetMinorNumber", &[Device, TO]),
    function("nvmlDeviceGetModuleId", &[Device, TO]),
    function("nvmlDeviceGetMultiGpuBoard", &[Device, TO]),
    function("nvmlDeviceGetNumGpuCores", &[Device, TO]),
    function("nvmlDeviceGetPdi", &[Device, Version(&[0x0100_0010])]),
    function("nvmlDeviceGetPersistenceMode", &[Device, TO]),
    function("nvmlDeviceGetPlatformInfo", &[Device, Version(&[0x0100_002c, 0x0200_002c])]),
    function("nvmlDeviceGetSerial", &[Device, TEXT]),
    function("nvmlDeviceGetVbiosVersion", &[Device, TEXT]),
    function("nvmlDeviceGetVirtualizationMode", &[Device, TO]),
    function("nvmlDeviceIsMigDeviceHandle", &[Device, TO]),
    // How devices are connected.
    function("nvmlDeviceGetGpuFabricInfo", &[Device, Bytes(28)]),
    function("nvmlDeviceGetGpuFabricInfoV", &[Device, Version(&[0x0200_0024, 0x0300_0028])]),
    function("nvmlDeviceGetNvLinkCapability", &[Device, KIND, KIND, TO]),
    function("nvmlDeviceGetNvLinkErrorCounter", &[Device, KIND, KIND, LONG]),
    function("nvmlDeviceGetNvLinkInfo", &[Device, Version(&[0x0100_0008, 0x0200_064c])]),
    function("nvmlDeviceGetNvLinkRemoteDeviceType", &[Device, KIND, TO]),
    function("nvmlDeviceGetNvLinkRemotePciInfo", &[Device, KIND, Bytes(68)]),
    function("nvmlDeviceGetNvLinkRemotePciInfo_v2", &[Device, KIND, Bytes(68)]),
    function("nvmlDeviceGetNvLinkState", &[Device, KIND, TO]),
    function("nvmlDeviceGetNvLinkUtilizationControl", &[Device, KIND, KIND, Bytes(8)]),
    function("nvmlDeviceGetNvLinkUtilizationCounter", &[Device, KIND, KIND, LONG, LONG]),
    function("nvmlDeviceGetNvLinkVersion", &[Device, KIND, TO]),
    function("nvmlDeviceGetNvlinkBwMode", &[Device, Version(&[0x0100_000c])]),
    function("nvmlDeviceGetNvlinkSupportedBwModes", &[Device, Version(&[0x0100_001c])]),
    function("nvmlDeviceGetP2PStatus", &[Device, Device, KIND, TO]),
    function("nvmlDeviceGetTopologyCommonAncestor", &[Device, Device, TO]),
    function("nvmlDeviceOnSameBoard", &[Device, Device, TO]),
    function("nvmlDeviceGetCurrPcieLinkGeneration", &[Device, TO]),
    function("nvmlDeviceGetCurrPcieLinkWidth", &[Device, TO]),
    function("nvmlDeviceGetGpuMaxPcieLinkGeneration", &[Device, TO]),
    function("nvmlDeviceGetMaxPcieLinkGeneration", &[Device, TO]),
    function("nvmlDeviceGetMaxPcieLinkWidth", &[Device, TO]),
    function("nvmlDeviceGetPcieLinkMaxSpeed", &[Device, TO]),
    function("nvmlDeviceGetPcieReplayCounter", &[Device, TO]),
    function("nvmlDeviceGetPcieSpeed", &[Device, TO]),
    function("nvmlDeviceGetPcieThroughput", &[Device, KIND, TO]),
    // How it is.
    function("nvmlDeviceGetFieldValues", &[Device, Number(256), Array(40)]),
    function("nvmlDeviceGetSamples", &[Device, KIND, Number(u64::MAX), TO, Count(512), List(16)]),
    function("nvmlDeviceGetPerformanceState", &[Device, TO]),
    function("nvmlDeviceGetPowerState", &[Device, TO]),
    function("nvmlDeviceGetDynamicPstatesInfo", &[Device, Bytes(132)]),
    function("nvmlDeviceGetSupportedPerformanceStates", &[Device, Sized(256)]),
    function("nvmlDeviceGetPerformanceModes", &[Device, Version(&[0x0100_0804])]),
    function("nvmlDeviceGetCurrentClocksEventReasons", &[Device, LONG]),
    function("nvmlDeviceGetCurrentClocksThrottleReasons", &[Device, LONG]),
    function("nvmlDeviceGetSupportedClocksEventReasons", &[Device, LONG]),
    function("nvmlDeviceGetSupportedClocksThrottleReasons", &[Device, LONG]),
    function("nvmlDeviceGetViolationStatus", &[Device, KIND, Bytes(16)]),
    function("nvmlDeviceGetUtilizationRates", &[Device, Bytes(8)]),
    function("nvmlDeviceGetDecoderUtilization", &[Device, TO, TO]),
    function("nvmlDeviceGetEncoderUtilization", &[Device, TO, TO]),
    function("nvmlDeviceGetJpgUtilization", &[Device, TO, TO]),
    function("nvmlDeviceGetOfaUtilization", &[Device, TO, TO]),
    function("nvmlDeviceGetEncoderCapacity", &[Device, KIND, TO]),
    function("nvmlDeviceGetAccountingMode", &[Device, TO]),
    // Its temperature, and fans.
    function("nvmlDeviceGetTemperature", &[Device, KIND, TO]),
    function("nvmlDeviceGetTemperatureV", &[Device, Version(&[0x0100_000c])]),
    function("nvmlDeviceGetTemperatureThreshold", &[Device, KIND, TO]),
    function("nvmlDeviceGetMarginTemperature", &[Device, Version(&[0x0100_0008])]),
    function("nvmlDeviceGetThermalSettings", &[Device, KIND, Bytes(64)]),
    function("nvmlDeviceGetCoolerInfo", &[Device, Version(&[0x0100_0010])]),
    function("nvmlDeviceGetFanControlPolicy_v2", &[Device, KIND, TO]),
    function("nvmlDeviceGetFanSpeed", &[Device, TO]),
    function("nvmlDeviceGetFanSpeed_v2", &[Device, KIND, TO]),
    function("nvmlDeviceGetFanSpeedRPM", &[Device, Version(&[0x0100_000c])]),
    function("nvmlDeviceGetMinMaxFanSpeed", &[Device, TO, TO]),
    function("nvmlDeviceGetNumFans", &[Device, TO]),
    function("nvmlDeviceGetTargetFanSpeed", &[Device, KIND, TO]),
    // Its power.
    function("nvmlDeviceGetEnforcedPowerLimit", &[Device, TO]),
    function("nvmlDeviceGetPowerManagementDefaultLimit", &[Device, TO]),
    function("nvmlDeviceGetPowerManagementLimit", &[Device, TO]),
    function("nvmlDeviceGetPowerManagementLimitConstraints", &[Device, TO, TO]),
    function("nvmlDeviceGetPowerManagementMode", &[Device, TO]),
    function("nvmlDeviceGetPowerSource", &[Device, TO]),
    function("nvmlDeviceGetPowerUsage", &[Device, TO]),
    function("nvmlDeviceGetTotalEnergyConsumption", &[Device, LONG]),
    // Its clocks.
    function("nvmlDeviceGetAdaptiveClockInfoStatus", &[Device, TO]),
    function("nvmlDeviceGetApplicationsClock", &[Device, KIND, TO]),
    function("nvmlDeviceGetAutoBoostedClocksEnabled", &[Device, TO, TO]),
    function("nvmlDeviceGetClock", &[Device, KIND, KIND, TO]),
    function("nvmlDeviceGetClockInfo", &[Device, KIND, TO]),
    function("nvmlDeviceGetClockOffsets", &[Device, Version(&[0x0100_0018])]),
    function("nvmlDeviceGetCurrentClockFreqs", &[Device, Version(&[0x0100_0804])]),
    function("nvmlDeviceGetDefaultApplicationsClock", &[Device, KIND, TO]),
    function("nvmlDeviceGetGpcClkMinMaxVfOffset", &[Device, TO, TO]),
    function("nvmlDeviceGetGpcClkVfOffset", &[Device, TO]),
    function("nvmlDeviceGetMaxClockInfo", &[Device, KIND, TO]),
    function("nvmlDeviceGetMaxCustomerBoostClock", &[Device, KIND, TO]),
    function("nvmlDeviceGetMemClkMinMaxVfOffset", &[Device, TO, TO]),
    function("nvmlDeviceGetMemClkVfOffset", &[Device, TO]),
    function("nvmlDeviceGetMinMaxClockOfPState", &[Device, KIND, KIND, TO, TO]),
    function("nvmlDeviceGetSupportedGraphicsClocks", &[Device, ANY, Count(1024), List(4)]),
    function("nvmlDeviceGetSupportedMemoryClocks", &[Device, Count(1024), List(4)]),
    // Errors of its memory.
    function("nvmlDeviceGetDefaultEccMode", &[Device, TO]),
    function("nvmlDeviceGetDetailedEccErrors", &[Device, KIND, KIND, Bytes(32)]),
    function("nvmlDeviceGetDramEncryptionMode", &[Device, Version(&[0x0100_0008]), Version(&[0x0100_0008])]),
    function("nvmlDeviceGetEccMode", &[Device, TO, TO]),
    function("nvmlDeviceGetMemoryErrorCounter", &[Device, KIND, KIND, KIND, LONG]),
    function("nvmlDeviceGetRemappedRows", &[Device, TO, TO, TO, TO]),
    function("nvmlDeviceGetRepairStatus", &[Device, Version(&[0x0100_000c])]),
    function("nvmlDeviceGetRetiredPagesPendingStatus", &[Device, TO]),
    function("nvmlDeviceGetRowRemapperHistogram", &[Device, Bytes(20)]),
    function("nvmlDeviceGetSramEccErrorStatus", &[Device, Version(&[0x0100_0068])]),
    function("nvmlDeviceGetTotalEccErrors", &[Device, KIND, KIND, LONG]),
];

/// The number of a function.
#[must_use]
pub fn number(name: &str) -> Option<usize> {
    FUNCTIONS.iter().position(|function| function.name == name)
}

/// What a parameter passes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Value {
    /// A device.
    Device([u8; 16]),
    /// A number.
    Number(u64),
    /// What a pointer points to.
    Memory(Vec<u8>),
    /// The same, with how long that is behind it.
    Sized(Vec<u8>),
    /// A null pointer.
    Nothing,
}

/// A function with what is passed to it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Question {
    /// Its number.
    pub function: usize,
    /// As many as its parameters.
    pub values: Vec<Value>,
}

impl Question {
    /// As it is sent.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        put(&mut bytes, self.function as u64);
        for value in &self.values {
            match value {
                Value::Device(uuid) => bytes.extend_from_slice(uuid),
                Value::Number(number) => put(&mut bytes, *number),
                Value::Memory(memory) | Value::Sized(memory) => {
                    put(&mut bytes, memory.len() as u64);
                    put_bytes(&mut bytes, memory);
                }
                Value::Nothing => put(&mut bytes, u64::MAX),
            }
        }
        bytes
    }

    /// As it came: what the function takes, and nothing else.
    ///
    /// # Errors
    /// When it is no question.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        let number = usize::try_from(reader.word()?).map_err(|_| Malformed)?;
        let function = FUNCTIONS.get(number).ok_or(Malformed)?;
        let mut values = Vec::new();
        for parameter in function.parameters {
            let value = value(&mut reader, *parameter, values.last())?;
            values.push(value);
        }
        if reader.0.is_empty() { Ok(Self { function: number, values }) } else { Err(Malformed) }
    }

    /// The memory that it passes, which an answer has anew.
    fn memory(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        self.values.iter_mut().filter_map(|value| match value {
            Value::Memory(memory) | Value::Sized(memory) => Some(memory),
            _ => None,
        })
    }

    /// An answer, as it is sent: a result, and what memory is now.
    #[must_use]
    pub fn answer(&mut self, result: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        put(&mut bytes, result.into());
        self.memory().for_each(|memory| put_bytes(&mut bytes, memory));
        bytes
    }

    /// Takes an answer: the result, and what memory is now.
    ///
    /// # Errors
    /// When it is none.
    pub fn take(&mut self, answer: &[u8]) -> Result<u32, Malformed> {
        let mut reader = Reader(answer);
        let result = u32::try_from(reader.word()?).map_err(|_| Malformed)?;
        for memory in self.memory() {
            let bytes = reader.bytes(memory.len())?;
            memory.copy_from_slice(bytes);
        }
        if reader.0.is_empty() { Ok(result) } else { Err(Malformed) }
    }
}

/// How many items a value says that there are.
#[must_use]
pub fn items(value: Option<&Value>) -> usize {
    match value {
        Some(Value::Number(number)) => *number as usize,
        Some(Value::Memory(memory)) => {
            memory.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes) as usize)
        }
        _ => 0,
    }
}

/// What is passed for a parameter, behind another.
fn value(reader: &mut Reader<'_>, parameter: Parameter, before: Option<&Value>) -> Result<Value, Malformed> {
    let is_right: &dyn Fn(&[u8]) -> bool = match parameter {
        Device => return Ok(Value::Device(*reader.bytes(16)?.first_chunk().ok_or(Malformed)?)),
        Number(most) => {
            let number = reader.word()?;
            return if number <= most { Ok(Value::Number(number)) } else { Err(Malformed) };
        }
        Bytes(len) => &move |bytes| bytes.len() == len,
        Version(versions) => &move |bytes| {
            let version = bytes.first_chunk().map(|version| u32::from_ne_bytes(*version));
            version.is_some_and(|version| {
                versions.contains(&version) && bytes.len() == (version & 0xff_ffff) as usize
            })
        },
        Sized(most) => &move |bytes| bytes.len() <= most,
        Count(most) => &move |bytes| {
            bytes.first_chunk().is_some_and(|count| u32::from_ne_bytes(*count) <= most) && bytes.len() == 4
        },
        List(len) | Array(len) => &move |bytes| bytes.len() == items(before) * len,
    };
    let len = reader.word()?;
    if len == u64::MAX && matches!(parameter, List(_)) {
        return Ok(Value::Nothing);
    }
    let len = usize::try_from(len).ok().filter(|len| *len <= MOST).ok_or(Malformed)?;
    let bytes = reader.bytes(len)?.to_vec();
    match parameter {
        _ if !is_right(&bytes) => Err(Malformed),
        Sized(_) => Ok(Value::Sized(bytes)),
        _ => Ok(Value::Memory(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A question of a function with as much memory as may be.
    fn longest(number: usize) -> Question {
        let mut most = 0;
        let values = FUNCTIONS[number].parameters.iter().map(|parameter| match *parameter {
            Device => Value::Device([7; 16]),
            Number(greatest) => {
                most = greatest as usize;
                Value::Number(greatest)
            }
            Bytes(len) => Value::Memory(vec![1; len]),
            Version(versions) => {
                let version = versions[versions.len() - 1];
                let mut memory = vec![0; (version & 0xff_ffff) as usize];
                memory[..4].copy_from_slice(&version.to_ne_bytes());
                Value::Memory(memory)
            }
            Sized(len) => Value::Sized(vec![2; len]),
            Count(count) => {
                most = count as usize;
                Value::Memory(count.to_ne_bytes().to_vec())
            }
            List(len) | Array(len) => Value::Memory(vec![3; most * len]),
        });
        Question { function: number, values: values.collect() }
    }

    #[test]
    fn each_function_is_there_once_and_fits() {
        for (at, function) in FUNCTIONS.iter().enumerate() {
            assert_eq!(number(function.name), Some(at), "{}", function.name);
            let sizes = function.parameters.iter().filter(|parameter| matches!(parameter, Sized(_))).count();
            assert!(function.parameters.len() + sizes <= WORDS, "{}", function.name);
            let mut question = longest(at);
            let bytes = question.to_bytes();
            assert!(bytes.len() <= MOST, "{}: {}", function.name, bytes.len());
            assert_eq!(Question::from_bytes(&bytes).as_ref(), Ok(&question), "{}", function.name);
            let answer = question.answer(3);
            let mut asked = question.clone();
            asked.memory().for_each(|memory| memory.fill(0xff));
            assert_eq!((asked.take(&answer), &asked), (Ok(3), &question), "{}", function.name);
            assert!(answer.len() <= MOST, "{}", function.name);
        }
    }

    #[test]
    fn none_changes_a_device_or_tells_of_processes() {
        for Function { name, .. } in FUNCTIONS {
            let reads = name.contains("Get") || name.contains("DeviceIs") || name.contains("DeviceOn");
            let tells = ["Process", "Pid", "Sessions", "Accounting", "Vgpu", "Instance", "Event"];
            let harmless = ["nvmlDeviceGetAccountingMode", "nvmlDeviceGetCurrentClocksEventReasons"];
            let harmless = harmless.contains(name) || *name == "nvmlDeviceGetSupportedClocksEventReasons";
            assert!(reads && (harmless || !tells.iter().any(|word| name.contains(word))), "{name}");
        }
    }

    #[test]
    fn what_is_cut_longer_or_beyond_a_range_is_no_question() {
        let refused = |question: &Question| {
            assert_eq!(Question::from_bytes(&question.to_bytes()), Err(Malformed), "{question:?}");
        };
        for (at, function) in FUNCTIONS.iter().enumerate() {
            let question = longest(at);
            let bytes = question.to_bytes();
            for len in (0..bytes.len()).step_by(8).chain([bytes.len() - 1]) {
                assert_eq!(Question::from_bytes(&bytes[..len]), Err(Malformed), "{at}: {len}");
            }
            assert_eq!(Question::from_bytes(&[&bytes[..], &[0; 8]].concat()), Err(Malformed), "{at}");
            for (place, parameter) in function.parameters.iter().enumerate() {
                let mut other = question.clone();
                match (&mut other.values[place], parameter) {
                    (Value::Number(number), Number(most)) if *most < u64::MAX => *number = most + 1,
                    (Value::Memory(memory) | Value::Sized(memory), _) => memory.push(0),
                    _ => continue,
                }
                refused(&other);
                if let (Value::Memory(memory), Version(_)) = (&mut other.values[place], parameter) {
                    memory.pop();
                    memory[3] ^= 0x40;
                    refused(&other);
                }
                if !matches!(parameter, List(_) | Number(_)) {
                    other.values[place] = Value::Nothing;
                    refused(&other);
                }
            }
        }
        let beyond = Question { function: FUNCTIONS.len(), values: Vec::new() };
        refused(&beyond);
    }
}
