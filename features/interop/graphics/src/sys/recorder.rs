//! Commands: recorded, submitted, and kept with all that they use until they have run.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ash::vk;
use vm_accel::{Error, Result};

use super::resource::WHOLE;
use super::{Device, Pipeline, RawBuffer, RawImage, RawTimeline, failed};

/// How many submissions may be on their way.
const DEPTH: usize = 8;

/// What a submission uses.
type Kept = Vec<Arc<dyn Any + Send + Sync>>;

/// A buffer of commands with its pool.
struct Slot {
    pool: vk::CommandPool,
    buffer: vk::CommandBuffer,
    /// The value of the ring's timeline when its commands have run.
    done: u64,
    kept: Kept,
    device: Arc<Device>,
}

impl Slot {
    fn new(device: &Arc<Device>) -> Result<Self> {
        let family = device.physical.family.unwrap_or_default();
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the structure is a local.
        let pool = unsafe { device.handle.create_command_pool(&info, None) };
        let pool = pool.map_err(failed("vkCreateCommandPool"))?;
        let buffer = vk::CommandBuffer::null();
        let mut this = Self { pool, buffer, done: 0, kept: Vec::new(), device: Arc::clone(device) };
        let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
        // SAFETY: the pool is live.
        let buffers = unsafe { device.handle.allocate_command_buffers(&info) };
        this.buffer =
            buffers.map_err(failed("vkAllocateCommandBuffers"))?.first().copied().unwrap_or_default();
        Ok(this)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: its commands have run, or were never submitted.
        unsafe { self.device.handle.destroy_command_pool(self.pool, None) };
    }
}

#[derive(Default)]
struct Slots {
    free: Vec<Slot>,
    /// Those on their way, the oldest first.
    busy: std::collections::VecDeque<Slot>,
    made: usize,
    submitted: u64,
}

/// The submissions of a device, in their order.
pub(crate) struct Ring {
    slots: Mutex<Slots>,
    done: RawTimeline,
    pub(crate) device: Arc<Device>,
}

impl Ring {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Self { slots: Mutex::default(), done: RawTimeline::new(device)?, device: Arc::clone(device) })
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A recorder, once there is room for another submission.
    pub(crate) fn record(&self, deadline: Instant) -> Result<Recorder<'_>> {
        let slot = self.slot(deadline)?;
        let device = &self.device.handle;
        let recorder = Recorder { slot: Some(slot), kept: Vec::new(), ring: self };
        let Some(slot) = &recorder.slot else { return Err(Error::Stopped) };
        // SAFETY: the pool's commands have run.
        unsafe { device.reset_command_pool(slot.pool, vk::CommandPoolResetFlags::empty()) }
            .map_err(failed("vkResetCommandPool"))?;
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the buffer is not recorded, and its commands have run.
        unsafe { device.begin_command_buffer(slot.buffer, &info) }.map_err(failed("vkBeginCommandBuffer"))?;
        Ok(recorder)
    }

    fn slot(&self, deadline: Instant) -> Result<Slot> {
        loop {
            let mut slots = self.lock();
            self.reap(&mut slots)?;
            if let Some(slot) = slots.free.pop() {
                return Ok(slot);
            }
            if slots.made < DEPTH {
                slots.made += 1;
                return Slot::new(&self.device).inspect_err(|_| slots.made -= 1);
            }
            let Some(oldest) = slots.busy.front().map(|slot| slot.done) else {
                return Err(Error::QueueFull { capacity: DEPTH });
            };
            // Others may submit what it waits for.
            drop(slots);
            if !self.done.wait(oldest, deadline)? {
                return Err(Error::Deadline { what: "the oldest frame on its way".into() });
            }
        }
    }

    /// Takes back the slots whose commands have run.
    fn reap(&self, slots: &mut Slots) -> Result<()> {
        let done = self.done.value()?;
        while slots.busy.front().is_some_and(|slot| slot.done <= done) {
            if let Some(mut slot) = slots.busy.pop_front() {
                slot.kept.clear();
                slots.free.push(slot);
            }
        }
        Ok(())
    }

    /// Waits for all that was submitted, and lets go of what that used.
    pub(crate) fn finish(&self, deadline: Instant) -> Result<()> {
        let last = self.lock().submitted;
        if !self.done.wait(last, deadline)? {
            return Err(Error::Deadline { what: "the end of the frames on their way".into() });
        }
        self.reap(&mut self.lock())
    }

    /// The same, and keeps nothing for further frames.
    pub(crate) fn release(&self, deadline: Instant) -> Result<()> {
        self.finish(deadline)?;
        let mut slots = self.lock();
        let free = std::mem::take(&mut slots.free);
        slots.made -= free.len();
        drop(slots);
        drop(free);
        Ok(())
    }

    /// Whether the device is lost: then nothing runs any more.
    fn is_lost(&self) -> bool {
        self.done.value().is_err_and(|error| error.is_lost())
    }
}

impl Ring {
    /// Ends it: what may still run is left to the end of the process.
    pub(crate) fn end(&self, deadline: Instant) {
        let Err(error) = self.finish(deadline) else { return };
        let busy = std::mem::take(&mut self.lock().busy);
        if !self.is_lost() {
            tracing::error!(device = self.device.physical.name, %error, "frames do not end; what they use is left to them");
            std::mem::forget(busy);
            std::mem::forget(Arc::clone(&self.device));
        }
    }
}

/// Commands that are being recorded. Dropping it forgets them.
pub(crate) struct Recorder<'a> {
    slot: Option<Slot>,
    kept: Kept,
    ring: &'a Ring,
}

/// What an image or a buffer is given up to, or taken from.
const OTHERS: u32 = vk::QUEUE_FAMILY_EXTERNAL;

impl Recorder<'_> {
    fn buffer(&self) -> vk::CommandBuffer {
        self.slot.as_ref().map_or_else(vk::CommandBuffer::null, |slot| slot.buffer)
    }

    fn device(&self) -> &ash::Device {
        &self.ring.device.handle
    }

    fn family(&self) -> u32 {
        self.ring.device.physical.family.unwrap_or_default()
    }

    /// Keeps something until the commands have run.
    pub(crate) fn keep(&mut self, kept: Arc<dyn Any + Send + Sync>) {
        self.kept.push(kept);
    }

    fn barrier(&self, info: &vk::DependencyInfo<'_>) {
        // SAFETY: the buffer is being recorded; what the structure names is live.
        unsafe { self.device().cmd_pipeline_barrier2(self.buffer(), info) };
    }

    /// Lets what follows see what came before.
    pub(crate) fn order(&self) {
        let all = [vk::MemoryBarrier2::default()
            .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .dst_access_mask(vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE)];
        self.barrier(&vk::DependencyInfo::default().memory_barriers(&all));
    }

    /// Lets the host see what was copied to where it reads: without this it may stay in the device's caches.
    pub(crate) fn show_host(&self) {
        let all = [vk::MemoryBarrier2::default()
            .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(vk::PipelineStageFlags2::HOST)
            .dst_access_mask(vk::AccessFlags2::HOST_READ)];
        self.barrier(&vk::DependencyInfo::default().memory_barriers(&all));
    }

    /// Takes an image from another API, or gives it one, or begins it.
    pub(crate) fn image_owner(&self, image: &RawImage, from: Option<bool>) {
        let mut change = vk::ImageMemoryBarrier2::default()
            .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .dst_access_mask(vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE)
            .old_layout(vk::ImageLayout::GENERAL)
            .new_layout(vk::ImageLayout::GENERAL)
            .src_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
            .dst_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
            .image(image.handle)
            .subresource_range(WHOLE);
        change = match from {
            None => change.old_layout(vk::ImageLayout::UNDEFINED),
            Some(true) => change.src_queue_family_index(OTHERS).dst_queue_family_index(self.family()),
            Some(false) => change.src_queue_family_index(self.family()).dst_queue_family_index(OTHERS),
        };
        self.barrier(&vk::DependencyInfo::default().image_memory_barriers(&[change]));
    }

    /// Takes a buffer from another API, or gives it one.
    pub(crate) fn buffer_owner(&self, buffer: &RawBuffer, taken: bool) {
        let (from, to) = if taken { (OTHERS, self.family()) } else { (self.family(), OTHERS) };
        let change = [vk::BufferMemoryBarrier2::default()
            .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .dst_access_mask(vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE)
            .src_queue_family_index(from)
            .dst_queue_family_index(to)
            .buffer(buffer.handle)
            .size(vk::WHOLE_SIZE)];
        self.barrier(&vk::DependencyInfo::default().buffer_memory_barriers(&change));
    }

    /// Sets all of an image to one color.
    pub(crate) fn clear(&self, image: &RawImage, color: [f32; 4]) {
        let (color, layout) = (vk::ClearColorValue { float32: color }, vk::ImageLayout::GENERAL);
        // SAFETY: the buffer is being recorded; the image is live.
        unsafe { self.device().cmd_clear_color_image(self.buffer(), image.handle, layout, &color, &[WHOLE]) };
    }

    /// Sets all of a buffer to one number.
    pub(crate) fn fill(&self, buffer: &RawBuffer, value: u32) {
        // SAFETY: as above, of the buffer.
        unsafe { self.device().cmd_fill_buffer(self.buffer(), buffer.handle, 0, vk::WHOLE_SIZE, value) };
    }

    /// Copies bytes from one buffer to another; the caller has checked that both have them.
    pub(crate) fn copy(&self, from: &RawBuffer, to: &RawBuffer, [at_from, at_to, bytes]: [u64; 3]) {
        let part = vk::BufferCopy::default().src_offset(at_from).dst_offset(at_to).size(bytes);
        // SAFETY: as above, of both.
        unsafe { self.device().cmd_copy_buffer(self.buffer(), from.handle, to.handle, &[part]) };
    }

    /// All pixels of a level of a layer.
    fn part(image: &RawImage, [level, layer]: [u32; 2]) -> vk::BufferImageCopy {
        let [width, height] = image.size.map(|side| (side >> level).max(1));
        let part = vk::ImageSubresourceLayers::default()
            .aspect_mask(vk::ImageAspectFlags::COLOR)
            .mip_level(level)
            .base_array_layer(layer)
            .layer_count(1);
        let extent = vk::Extent3D { width, height, depth: 1 };
        vk::BufferImageCopy::default().image_subresource(part).image_extent(extent)
    }

    /// Copies the pixels of a level of a layer into a buffer; the caller has checked that there is one, and room.
    pub(crate) fn image_to_buffer(&self, from: &RawImage, to: &RawBuffer, part: [u32; 2]) {
        let (part, layout, device) = (Self::part(from, part), vk::ImageLayout::GENERAL, self.device());
        // SAFETY: as above, of both.
        unsafe { device.cmd_copy_image_to_buffer(self.buffer(), from.handle, layout, to.handle, &[part]) };
    }

    /// The other way, of the first level and layer.
    pub(crate) fn buffer_to_image(&self, from: &RawBuffer, to: &RawImage) {
        let (part, layout, device) = (Self::part(to, [0, 0]), vk::ImageLayout::GENERAL, self.device());
        // SAFETY: as above, of both.
        unsafe { device.cmd_copy_buffer_to_image(self.buffer(), from.handle, to.handle, layout, &[part]) };
    }

    /// Draws a pipeline's triangle over all of an image.
    pub(crate) fn draw(&self, pipeline: &Pipeline, target: &RawImage, number: u32) {
        let [width, height] = target.size;
        let area = vk::Rect2D { extent: vk::Extent2D { width, height }, ..vk::Rect2D::default() };
        let colors = [vk::RenderingAttachmentInfo::default()
            .image_view(target.view)
            .image_layout(vk::ImageLayout::GENERAL)
            .load_op(vk::AttachmentLoadOp::DONT_CARE)
            .store_op(vk::AttachmentStoreOp::STORE)];
        let info = vk::RenderingInfo::default().render_area(area).layer_count(1).color_attachments(&colors);
        let (device, buffer) = (self.device(), self.buffer());
        let view =
            vk::Viewport { width: width as f32, height: height as f32, max_depth: 1.0, ..Default::default() };
        let (fragment, graphics) = (vk::ShaderStageFlags::FRAGMENT, vk::PipelineBindPoint::GRAPHICS);
        // SAFETY: the buffer is being recorded; the image is live.
        unsafe { device.cmd_begin_rendering(buffer, &info) };
        // SAFETY: as above; the pipeline is live, and kept.
        unsafe { device.cmd_bind_pipeline(buffer, graphics, pipeline.handle) };
        // SAFETY: as above.
        unsafe { device.cmd_set_viewport(buffer, 0, &[view]) };
        // SAFETY: as above.
        unsafe { device.cmd_set_scissor(buffer, 0, &[area]) };
        // SAFETY: as above; the layout has such constants.
        unsafe { device.cmd_push_constants(buffer, pipeline.layout, fragment, 0, &number.to_ne_bytes()) };
        // SAFETY: as above.
        unsafe { device.cmd_draw(buffer, 3, 1, 0, 0) };
        // SAFETY: as above.
        unsafe { device.cmd_end_rendering(buffer) };
    }

    /// Gives the commands to the device: they begin when the first of each pair of `waits` has reached the second, and signal
    /// those of `signals`.
    pub(crate) fn submit(
        mut self,
        waits: &[(Arc<RawTimeline>, u64)],
        signals: &[(Arc<RawTimeline>, u64)],
    ) -> Result<()> {
        let Some(mut slot) = self.slot.take() else { return Err(Error::Stopped) };
        let device = &self.ring.device;
        // SAFETY: the buffer is being recorded.
        let ended = unsafe { device.handle.end_command_buffer(slot.buffer) };
        let at = |timeline: &RawTimeline, value: u64| {
            vk::SemaphoreSubmitInfo::default()
                .semaphore(timeline.handle)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        let mut slots = self.ring.lock();
        slot.done = slots.submitted + 1;
        slot.kept = std::mem::take(&mut self.kept);
        for (timeline, _) in waits.iter().chain(signals) {
            slot.kept.push(Arc::clone(timeline) as Arc<dyn Any + Send + Sync>);
        }
        let waits: Vec<_> = waits.iter().map(|(timeline, value)| at(timeline, *value)).collect();
        let mut signals: Vec<_> = signals.iter().map(|(timeline, value)| at(timeline, *value)).collect();
        signals.push(at(&self.ring.done, slot.done));
        let buffers = [vk::CommandBufferSubmitInfo::default().command_buffer(slot.buffer)];
        let info = vk::SubmitInfo2::default()
            .wait_semaphore_infos(&waits)
            .command_buffer_infos(&buffers)
            .signal_semaphore_infos(&signals);
        let submitted = ended.map_err(failed("vkEndCommandBuffer")).and_then(|()| {
            // SAFETY: the slot keeps what the commands use, and is not used again before its value is reached.
            unsafe { device.submit(&info) }
        });
        match submitted {
            Ok(()) => {
                slots.submitted = slot.done;
                slots.busy.push_back(slot);
                Ok(())
            }
            Err(error) => {
                slot.kept.clear();
                slots.free.push(slot);
                Err(error)
            }
        }
    }
}

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.ring.lock().free.push(slot);
        }
    }
}
