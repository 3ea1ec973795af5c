//! The rest of the driver's functions, so that a program finds them: textures, external memory, multicast and so on.

use crate::error::Error;

/// Exports functions that return `CUDA_ERROR_NOT_SUPPORTED`, as those of other files; their arguments are not looked at.
macro_rules! unsupported {
    ($($since:literal $name:ident $(/ $own:ident)?,)*) => {
        $(
            super::export!($name () { Err(Error::NotSupported) });
            $(super::export!($own () { Err(Error::NotSupported) });)?
        )*

        pub(super) fn table() -> Vec<crate::names::Entry> {
            vec![$(
                super::entry!($name, $since),
                $(super::entry!($own, $since),)?
            )*]
        }
    };
}

unsupported! {
    2000 cuArray3DCreate, 2000 cuArray3DGetDescriptor,
    3020 cuArray3DGetDescriptor_v2, 2000 cuArrayCreate,
    2000 cuArrayGetDescriptor, 3020 cuArrayGetDescriptor_v2, 11060 cuArrayGetMemoryRequirements,
    11020 cuArrayGetPlane, 11010 cuArrayGetSparseProperties,
    12040 cuCtxFromGreenCtx, 12040 cuCtxGetDevResource, 11040 cuCtxGetExecAffinity,
    4020 cuCtxGetSharedMemConfig, 12050 cuCtxRecordEvent, 4020 cuCtxSetSharedMemConfig,
    12050 cuCtxWaitEvent, 10000 cuDestroyExternalMemory, 10000 cuDestroyExternalSemaphore,
    12040 cuDevResourceGenerateDesc, 13010 cuDevSmResourceSplit, 12040 cuDevSmResourceSplitByCount,
    13040 cuDeviceGetCliqueCount, 13040 cuDeviceGetCliqueInfo, 12040 cuDeviceGetDevResource,
    11040 cuDeviceGetExecAffinitySupport, 13040 cuDeviceGetFabricClusterUuid,
    11040 cuDeviceGetGraphMemAttribute, 13000 cuDeviceGetHostAtomicCapabilities, 10000 cuDeviceGetLuid,
    10020 cuDeviceGetNvSciSyncAttributes, 13000 cuDeviceGetP2PAtomicCapabilities,
    2000 cuDeviceGetProperties, 11010 cuDeviceGetTexture1DLinearMaxWidth,
    12040 cuDeviceRegisterAsyncNotification, 11040 cuDeviceSetGraphMemAttribute,
    12040 cuDeviceUnregisterAsyncNotification, 10000 cuExternalMemoryGetMappedBuffer,
    10000 cuExternalMemoryGetMappedMipmappedArray, 11030 cuFlushGPUDirectRDMAWrites,     2000 cuFuncSetBlockShape,
    4020 cuFuncSetSharedMemConfig, 2000 cuFuncSetSharedSize,     11020 cuGraphAddExternalSemaphoresSignalNode, 11020 cuGraphAddExternalSemaphoresWaitNode,
    13040 cuGraphAddNode_v3,
                11020 cuGraphExecExternalSemaphoresSignalNodeSetParams,
    11020 cuGraphExecExternalSemaphoresWaitNodeSetParams, 13010 cuGraphExecGetId,
    11020 cuGraphExternalSemaphoresSignalNodeGetParams,
    11020 cuGraphExternalSemaphoresSignalNodeSetParams, 11020 cuGraphExternalSemaphoresWaitNodeGetParams,
    11020 cuGraphExternalSemaphoresWaitNodeSetParams, 13010 cuGraphGetId,         13010 cuGraphNodeGetContainingGraph, 13010 cuGraphNodeGetLocalId,
    13020 cuGraphNodeGetParams, 13010 cuGraphNodeGetToolsId, 13040 cuGraphNodeSetParams_v2,
    12040 cuGreenCtxCreate, 12040 cuGreenCtxDestroy,
    12040 cuGreenCtxGetDevResource, 12090 cuGreenCtxGetId, 12040 cuGreenCtxRecordEvent,
    12050 cuGreenCtxStreamCreate, 12040 cuGreenCtxWaitEvent, 10000 cuImportExternalMemory,
    10000 cuImportExternalSemaphore, 2000 cuLaunch, 9000 cuLaunchCooperativeKernelMultiDevice,
    2000 cuLaunchGrid, 2000 cuLaunchGridAsync,
    12000 cuLibraryGetUnifiedFunction,         12060 cuMemBatchDecompressAsync / cuMemBatchDecompressAsync_ptsz,
    13000 cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz,
    13000 cuMemDiscardBatchAsync / cuMemDiscardBatchAsync_ptsz, 13000 cuMemGetDefaultMemPool,
    13040 cuMemGetLocationInfo, 13000 cuMemGetMemPool, 11020 cuMemPoolExportPointer,
    11020 cuMemPoolExportToShareableHandle, 11020 cuMemPoolImportFromShareableHandle,
    11020 cuMemPoolImportPointer, 13000 cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz,
    13000 cuMemSetMemPool,
    13020 cuMemcpy3DWithAttributesAsync / cuMemcpy3DWithAttributesAsync_ptsz,
    13020 cuMemcpyWithAttributesAsync / cuMemcpyWithAttributesAsync_ptsz,
    5000 cuMipmappedArrayGetLevel,
    11060 cuMipmappedArrayGetMemoryRequirements, 11010 cuMipmappedArrayGetSparseProperties,
    3000 cuModuleGetSurfRef,
    2000 cuModuleGetTexRef, 12010 cuMulticastAddDevice, 12010 cuMulticastBindAddr,
    13010 cuMulticastBindAddr_v2, 12010 cuMulticastBindMem, 13010 cuMulticastBindMem_v2,
    12010 cuMulticastCreate, 12010 cuMulticastGetGranularity, 12010 cuMulticastUnbind,
    10000 cuSignalExternalSemaphoresAsync / cuSignalExternalSemaphoresAsync_ptsz,
    8000 cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz,
    11070 cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz,
    13010 cuStreamBeginCaptureToCig / cuStreamBeginCaptureToCig_ptsz,
    12030 cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz,
    13030 cuStreamBeginRecaptureToGraph / cuStreamBeginRecaptureToGraph_ptsz,
    11000 cuStreamCopyAttributes / cuStreamCopyAttributes_ptsz,
    13010 cuStreamEndCaptureToCig / cuStreamEndCaptureToCig_ptsz,
    11000 cuStreamGetAttribute / cuStreamGetAttribute_ptsz,
    13010 cuStreamGetDevResource / cuStreamGetDevResource_ptsz, 12040 cuStreamGetGreenCtx,
    11000 cuStreamSetAttribute / cuStreamSetAttribute_ptsz,
    5000 cuSurfObjectCreate, 5000 cuSurfObjectDestroy, 5000 cuSurfObjectGetResourceDesc,
    12000 cuTensorMapEncodeIm2col, 12080 cuTensorMapEncodeIm2colWide, 12000 cuTensorMapEncodeTiled,
    12000 cuTensorMapReplaceAddress, 13050 cuTensorMapSetAllocationClass, 5000 cuTexObjectCreate,
    5000 cuTexObjectDestroy, 5000 cuTexObjectGetResourceDesc, 5000 cuTexObjectGetResourceViewDesc,
    5000 cuTexObjectGetTextureDesc, 10000 cuWaitExternalSemaphoresAsync / cuWaitExternalSemaphoresAsync_ptsz,
}
