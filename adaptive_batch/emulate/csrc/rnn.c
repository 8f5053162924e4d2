/* cuDNN's recurrent networks: where each matrix lies in the weights, which PyTorch copies there, and how much a step needs. */
#include "stack.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 8 };
typedef struct { int type, dimensions, size[MOST_DIMENSIONS], stride[MOST_DIMENSIONS]; } tensor_descriptor;

EXPORT int cudnnCreateTensorDescriptor(tensor_descriptor **of) { *of = calloc(1, sizeof **of); return 0; }
EXPORT int cudnnDestroyTensorDescriptor(tensor_descriptor *of) { free(of); return 0; }
EXPORT int cudnnSetTensorNdDescriptor(tensor_descriptor *of, int type, int dimensions, const int *size, const int *stride) {
  of->type = type, of->dimensions = dimensions < MOST_DIMENSIONS ? dimensions : MOST_DIMENSIONS;
  memcpy(of->size, size, (size_t)of->dimensions * sizeof *size);
  memcpy(of->stride, stride, (size_t)of->dimensions * sizeof *stride);
  return 0;
}
EXPORT int cudnnGetTensorNdDescriptor(const tensor_descriptor *of, int room, int *type, int *dimensions, int *size, int *stride) {
  *type = of->type, *dimensions = of->dimensions;
  for (int i = 0; i < of->dimensions && i < room; i++) size[i] = of->size[i], stride[i] = of->stride[i];
  return 0;
}

EXPORT int cudnnCreateDropoutDescriptor(void **to) { *to = new_handle(); return 0; }
EXPORT int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
  (void)handle;
  *bytes = MIB;
  unknown_workspace("cudnnDropoutGetStatesSize");
  return 0;
}

/* `output` is the width of what a step gives to the next, `hidden` or that of a projection. */
typedef struct { int gates, biases, directions, type, layers; size_t input, hidden, output; } network;

EXPORT int cudnnCreateRNNDescriptor(network **to) { *to = calloc(1, sizeof **to); return 0; }
EXPORT int cudnnDestroyRNNDescriptor(network *of) { free(of); return 0; }
EXPORT int cudnnSetRNNDescriptor_v8(network *of, int algorithm, int cell, int bias, int bidirectional, int input_mode, int type, int precision, int math, int input,
                                    int hidden, int projection, int layers) {
  enum { LSTM = 2, GRU = 3, NO_BIAS = 0, DOUBLE_BIAS = 2 };
  (void)algorithm, (void)input_mode, (void)precision, (void)math;
  *of = (network){
    .gates = cell == LSTM ? 4 : cell == GRU ? 3 : 1,
    .biases = bias == NO_BIAS ? 0 : bias == DOUBLE_BIAS ? 2 : 1,
    .directions = bidirectional ? 2 : 1,
    .type = type, .layers = layers, .input = (size_t)input, .hidden = (size_t)hidden,
    .output = (size_t)(projection && projection < hidden ? projection : hidden),
  };
  return 0;
}

static size_t element_bytes(int type) { return type == 0 ? 4 : type == 1 ? 8 : 2; } /* float, double, half and bfloat16 */
static size_t input_of(const network *of, int layer) { return layer ? of->output * (size_t)of->directions : of->input; }
static int has_projection(const network *of) { return of->output != of->hidden; }
static size_t matrix_elements(const network *of, int layer) {
  size_t of_gates = (size_t)of->gates * of->hidden * (input_of(of, layer) + of->output);
  return of_gates + (has_projection(of) ? of->hidden * of->output : 0);
}
static size_t bias_elements(const network *of) { return (size_t)(of->biases * of->gates) * of->hidden; }

EXPORT int cudnnGetRNNWeightSpaceSize(void *handle, const network *of, size_t *bytes) {
  (void)handle;
  size_t elements = 0;
  for (int layer = 0; layer < of->layers; layer++) elements += (size_t)of->directions * (matrix_elements(of, layer) + bias_elements(of));
  *bytes = elements * element_bytes(of->type);
  return 0;
}

static void describe(tensor_descriptor *to, int type, size_t rows, size_t columns) {
  *to = (tensor_descriptor){type, 3, {1, (int)rows, (int)columns}, {(int)(rows * columns), (int)columns, 1}};
}

/* `part` counts a pseudo layer's matrices: of the input for each gate, of the state for each gate, and the projection. */
EXPORT int cudnnGetRNNWeightParams(void *handle, const network *of, int pseudo_layer, size_t bytes, char *weights, int part, tensor_descriptor *matrix,
                                   char **matrix_address, tensor_descriptor *bias, char **bias_address) {
  (void)handle, (void)bytes;
  int layer = pseudo_layer / of->directions;
  size_t input = input_of(of, layer), size = element_bytes(of->type), gates = (size_t)of->gates, number = (size_t)part, at = 0, bias_at = 0;
  for (int before = 0; before < of->layers * of->directions; before++) {
    bias_at += matrix_elements(of, before / of->directions);
    if (before < pseudo_layer) at += matrix_elements(of, before / of->directions);
  }
  bias_at += (size_t)pseudo_layer * bias_elements(of);
  tensor_descriptor none = {0}, found = {0}, found_bias = {0};
  char *address = NULL, *address_of_bias = NULL;
  if (number < 2 * gates) {
    size_t columns = number < gates ? input : of->output;
    at += of->hidden * (number < gates ? number * input : gates * input + (number - gates) * of->output);
    describe(&found, of->type, of->hidden, columns);
    address = weights + at * size;
    if (of->biases == 2 || (of->biases == 1 && number < gates)) {
      describe(&found_bias, of->type, of->hidden, 1);
      address_of_bias = weights + (bias_at + number * of->hidden) * size;
    }
  } else if (has_projection(of)) {
    describe(&found, of->type, of->output, of->hidden);
    address = weights + (at + gates * of->hidden * (input + of->output)) * size;
  }
  if (bias) *bias = address_of_bias ? found_bias : none;
  if (matrix) *matrix = found; /* PyTorch gives one descriptor for both and asks for one address at a time */
  if (bias && matrix == bias && bias_address && !matrix_address) *bias = found_bias;
  if (matrix_address) *matrix_address = address;
  if (bias_address) *bias_address = address_of_bias;
  return 0;
}

typedef struct { size_t longest, batch; } sequences;
EXPORT int cudnnCreateRNNDataDescriptor(sequences **to) { *to = calloc(1, sizeof **to); return 0; }
EXPORT int cudnnDestroyRNNDataDescriptor(sequences *of) { free(of); return 0; }
EXPORT int cudnnSetRNNDataDescriptor(sequences *of, int type, int layout, int longest, int batch) {
  (void)type, (void)layout;
  *of = (sequences){(size_t)longest, (size_t)batch};
  return 0;
}

/* Not published. Taken for each step, layer and direction: the gates and two states; and as much as one layer to work in. */
EXPORT int cudnnGetRNNTempSpaceSizes(void *handle, const network *of, int training, const sequences *input, size_t *workspace, size_t *reserve) {
  (void)handle;
  size_t layer = input->longest * input->batch * of->hidden * (size_t)(of->gates + 2) * (size_t)of->directions * element_bytes(of->type);
  if (workspace) *workspace = layer;
  if (reserve) *reserve = training ? layer * (size_t)of->layers : 0;
  unknown_workspace("cudnnGetRNNTempSpaceSizes");
  return 0;
}
