"""Compiled code of CUDA graphs whose tensors may lie elsewhere at every launch.

Parameters of kernels hold addresses: alone, or in descriptors of copies. Which words these are is
guessed from one recording, and believed of the tensors that lie elsewhere in another one, if the
first one foretells that one byte by byte. It takes the driver half a microsecond to give a kernel
of a graph other parameters, and graphs that run meanwhile keep theirs.

What this is compiled with: MOST_TENSORS, and `pit_graphs`, how many graphs there are.
"""

from __future__ import annotations

MOVING = """
// Tensors of a call, by their numbers: where they are, and how many bytes.
struct Places {
  char* data[MOST_TENSORS];
  int64_t bytes[MOST_TENSORS];
};

// A word of parameters that holds an address in a tensor.
struct Word { size_t at; int tensor; };

// A kernel of a graph: its parameters, one behind another, and where each of them begins.
struct Node {
  CUgraphNode node;
  CUDA_KERNEL_NODE_PARAMS kernel;
  std::vector<char> bytes;
  std::vector<size_t> starts;
  std::vector<Word> words;
};

// ``data``: addresses that it is launched with. ``moves``: bits of tensors that may lie elsewhere;
// none can in one of anything else than kernels, which is not ``known``.
struct Graph {
  cudaGraph_t graph;
  cudaGraphExec_t made;
  char* data[MOST_TENSORS];
  uint32_t moves;
  bool known;
  std::vector<Node> nodes;
};

// A function of the driver, NULL where it is older.
template <class Entry> static Entry pit_entry(const char* name, Entry) {
  void* entry = NULL;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &entry, 12040, cudaEnableDefault, &found);
  return (Entry)entry;
}
#define PIT_DRIVER(name) static const auto name##_ = pit_entry(#name, (decltype(&name))NULL)

static uint32_t pit_elsewhere(char* const* now, char* const* before) {
  uint32_t found = 0;
  for (int i = 0; i < MOST_TENSORS; ++i) found |= (uint32_t)(now[i] != before[i]) << i;
  return found;
}

// Copy the parameters of a kernel: whether the driver tells them.
static bool pit_read_node(Node* into) {
  PIT_DRIVER(cuGraphKernelNodeGetParams);
  PIT_DRIVER(cuKernelGetFunction);
  PIT_DRIVER(cuFuncGetParamInfo);
  CUDA_KERNEL_NODE_PARAMS* kernel = &into->kernel;
  if (!cuGraphKernelNodeGetParams_ || !cuKernelGetFunction_ || !cuFuncGetParamInfo_) return false;
  if (cuGraphKernelNodeGetParams_(into->node, kernel) || !kernel->kernelParams) return false;
  CUfunction func = kernel->func;
  if (!func && cuKernelGetFunction_(&func, kernel->kern)) return false;
  size_t offset, size;
  for (size_t i = 0; !cuFuncGetParamInfo_(func, i, &offset, &size); ++i) {
    const char* given = (const char*)kernel->kernelParams[i];
    into->starts.push_back(into->bytes.size());
    into->bytes.insert(into->bytes.end(), given, given + size);
    into->bytes.resize((into->bytes.size() + 7) / 8 * 8);  // each begins at a whole word
  }
  return true;
}

// The kernels of a graph, in order: whether there is nothing else in it.
static bool pit_read(cudaGraph_t graph, std::vector<Node>* nodes) {
  size_t number = 0;
  cudaGraphNodeType type;
  if (cudaGraphGetNodes(graph, NULL, &number)) return false;
  std::vector<cudaGraphNode_t> found(number);
  if (number && cudaGraphGetNodes(graph, found.data(), &number)) return false;
  nodes->resize(number);
  for (size_t i = 0; i < number; ++i) {
    (*nodes)[i].node = found[i];
    if (cudaGraphNodeGetType(found[i], &type) || type != cudaGraphNodeTypeKernel) return false;
    if (!pit_read_node(&(*nodes)[i])) return false;
  }
  return true;
}

// The tensor that an address is in; its first byte tells more than any other. -1 for none.
static int pit_tensor_at(const Places* places, const char* address) {
  int inside = -1;
  for (int i = MOST_TENSORS; i-- > 0;) {
    const char* data = places->data[i];
    if (!data || address < data || address >= data + places->bytes[i]) continue;
    if (address == data) return i;
    inside = i;
  }
  return inside;
}

static void pit_guess(Node* node, const Places* places) {
  for (size_t at = 0; at < node->bytes.size(); at += 8) {
    char* address;
    memcpy(&address, node->bytes.data() + at, 8);
    int tensor = pit_tensor_at(places, address);
    if (tensor >= 0) node->words.push_back({at, tensor});
  }
}

// Parameters of a kernel after tensors went from some addresses to others: whether they changed.
static bool pit_shift(Node* node, char* const* from, char* const* to) {
  bool changed = false;
  for (const Word& word : node->words) {
    char* address;
    if (from[word.tensor] == to[word.tensor]) continue;
    memcpy(&address, node->bytes.data() + word.at, 8);
    address += to[word.tensor] - from[word.tensor];
    memcpy(node->bytes.data() + word.at, &address, 8);
    changed = true;
  }
  return changed;
}

static void pit_drop(Graph* graph) {
  if (!graph) return;
  cudaGraphExecDestroy(graph->made);
  cudaGraphDestroy(graph->graph);
  delete graph;
  --pit_graphs;
}

// A graph of what was recorded, which it owns; NULL if the driver makes none.
static Graph* pit_make(cudaGraph_t recorded, const Places* places) {
  cudaGraphExec_t made = NULL;
  if (cudaGraphInstantiate(&made, recorded, 0)) {
    cudaGraphDestroy(recorded);
    return NULL;
  }
  ++pit_graphs;
  Graph* graph = new Graph{recorded, made, {}, 0};
  memcpy(graph->data, places->data, sizeof(graph->data));
  graph->known = pit_read(recorded, &graph->nodes);
  for (Node& node : graph->nodes) pit_guess(&node, places);
  return graph;
}

static bool pit_alike(const CUDA_KERNEL_NODE_PARAMS* a, const CUDA_KERNEL_NODE_PARAMS* b) {
  return a->func == b->func && a->kern == b->kern && a->sharedMemBytes == b->sharedMemBytes &&
         a->gridDimX == b->gridDimX && a->gridDimY == b->gridDimY && a->gridDimZ == b->gridDimZ &&
         a->blockDimX == b->blockDimX && a->blockDimY == b->blockDimY &&
         a->blockDimZ == b->blockDimZ;
}

// Whether a graph foretells another recording, which it owns, of the same call with tensors at
// other places: these may move from now on.
static bool pit_learn(Graph* graph, cudaGraph_t recorded, char* const* data) {
  std::vector<Node> there;
  bool same = graph->known && pit_read(recorded, &there) && there.size() == graph->nodes.size();
  for (size_t i = 0; same && i < there.size(); ++i) {
    Node node = graph->nodes[i];
    pit_shift(&node, graph->data, data);
    same = pit_alike(&node.kernel, &there[i].kernel) && node.starts == there[i].starts &&
           node.bytes == there[i].bytes;
  }
  if (same) graph->moves |= pit_elsewhere(data, graph->data);
  cudaGraphDestroy(recorded);
  return same;
}

// Whether a graph can be launched with tensors at these addresses.
static bool pit_may_move(const Graph* graph, char* const* data) {
  return !(pit_elsewhere(data, graph->data) & ~graph->moves);
}

// Let the next launches have their tensors at these addresses, where they may be: false where the
// driver fails, which leaves the graph in between.
static bool pit_move(Graph* graph, char* const* data) {
  PIT_DRIVER(cuGraphExecKernelNodeSetParams);
  if (!pit_elsewhere(data, graph->data)) return true;
  for (Node& node : graph->nodes) {
    if (!pit_shift(&node, graph->data, data)) continue;
    std::vector<void*> params;
    for (size_t start : node.starts) params.push_back(node.bytes.data() + start);
    CUDA_KERNEL_NODE_PARAMS kernel = node.kernel;
    kernel.kernelParams = params.data();
    if (!cuGraphExecKernelNodeSetParams_) return false;
    if (cuGraphExecKernelNodeSetParams_(graph->made, node.node, &kernel)) return false;
  }
  memcpy(graph->data, data, sizeof(graph->data));
  return true;
}
"""
